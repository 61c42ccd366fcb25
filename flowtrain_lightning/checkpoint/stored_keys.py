"""What weights and entries of optimizer states are called in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowtrain_lightning.checkpoint.optimizer_state import NamedState


def with_keys(weights: Mapping[str, Any], optimizers: Sequence[NamedState]) -> Iterator[tuple[str, str, Any]]:
    """For each weight and entry: ``weights.NAME`` or ``optimizer.NUMBER.NAME#ENTRY``, the name, and the value."""
    for name, value in weights.items():
        yield f"weights.{name}", name, value
    for number, optimizer in enumerate(optimizers):
        for name, entries in optimizer["state"].items():
            for entry, value in entries.items():
                yield f"optimizer.{number}.{name}#{entry}", name, value


def parse_key(key: str) -> tuple[int | None, str, str]:
    """The optimizer's number (None: a weight), the parameter's name and the entry of its state."""
    kind, _, rest = key.partition(".")
    if kind == "weights":
        return None, rest, ""
    number, _, rest = rest.partition(".")
    name, _, entry = rest.rpartition("#")
    return int(number), name, entry
