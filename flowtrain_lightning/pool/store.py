"""What ranks have in common before they meet: a store of ``torch.distributed``."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """What is asked of a ``torch.distributed`` store."""

    def set(self, key: str, value: str) -> None:
        """Make ``value`` known under ``key``."""

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are known."""

    def get(self, key: str) -> bytes:
        """The value of ``key``, which is known."""
