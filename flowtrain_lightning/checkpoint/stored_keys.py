"""Names of weights and of entries of optimizer states in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowtrain_lightning.checkpoint.optimizer_state import NamedState

WEIGHTS = {"weights": "state_dict", "current": "current_model_state"}
"""Prefix of keys of weights -> their place in Lightning's dictionary: those of the model, and, where these are
averages, those from which training goes on."""


def with_keys(checkpoint: Mapping[str, Any], optimizers: Sequence[NamedState]) -> Iterator[tuple[str, str, Any]]:
    """For each weight and entry: ``weights.NAME`` or ``optimizer.NUMBER.NAME#ENTRY``, the name, and the value."""
    for kind, key in WEIGHTS.items():
        for name, value in checkpoint.get(key, {}).items():
            yield f"{kind}.{name}", name, value
    for number, optimizer in enumerate(optimizers):
        for name, entries in optimizer["state"].items():
            for entry, value in entries.items():
                yield f"optimizer.{number}.{name}#{entry}", name, value


def parse_key(key: str) -> tuple[str | int, str, str]:
    """Splits a key: role or optimizer's number, the parameter's name, and the entry of its state."""
    kind, _, rest = key.partition(".")
    if kind in WEIGHTS:
        return WEIGHTS[kind], rest, ""
    number, _, rest = rest.partition(".")
    name, _, entry = rest.rpartition("#")
    return int(number), name, entry
