"""Rows of tables as records: objects have the keys that they were written with."""

from __future__ import annotations

from typing import Any


def row_as_record(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the nulls that its table put into objects.

    A table has one type for all objects of a column, with every key that any of them has, and null where one lacks it.
    A template would write these, and the model would learn to call a tool with the arguments of all others.

    Args:
        row: column -> value, as pyarrow gives it.
    """
    return {name: _as_written(value) for name, value in row.items()}


def _as_written(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:  # which a media item has both
        return {name: _as_written(held) for name, held in value.items() if held is not None}
    # A column has one type: its numbers need not be looked at one by one.
    if isinstance(value, list) and isinstance(next((held for held in value if held is not None), None), dict | list):
        return [_as_written(held) for held in value]
    return value
