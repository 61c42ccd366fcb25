"""Errors about data that cannot be used."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the record.

    Args:
        message: what is said. Halves of characters, which data may hold and no log can write, are spelled out in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())
