"""What a user may give to the data module, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.records import DataError
from flowtrain_lightning.packing.offline import BatchUnit

Files = str | Path | Sequence[str | Path]
"""One data file, or several that are read as one."""


def paths_of(name: str, files: Files | Mapping[str, float]) -> list[Path]:
    """The files of a stage.

    Raises:
        DataError: there is none, or files have weights where they mean nothing.
    """
    if isinstance(files, str | Path):
        return [Path(files)]
    if not files:
        raise DataError(f"{name} is an empty list of files; name at least one, or leave the argument out.")
    if isinstance(files, Mapping) and name != "train":
        raise DataError(f"{name} gives files weights, which only train may have; give a list of files.")
    return [Path(file) for file in files]


def refuse_unknown(**settings: tuple[str, Sequence[str]]) -> None:
    """Raises a ValueError for a word that is not among those known; each setting is what was given and the words."""
    for name, (given, known) in settings.items():
        if given not in known:
            raise ValueError(f"{name} is {given!r}; give one of {', '.join(map(repr, known))}.")


def refuse_mixed_batch_units(
    batch_unit: BatchUnit, microbatches: int | None, balance_group: int | None, drop_last: bool
) -> None:
    """Raises a ValueError for settings that the other batch unit has."""
    if batch_unit == "tokens" and microbatches is None:
        raise ValueError("With batch_unit='tokens' a training step is a number of microbatches: set microbatches.")
    if batch_unit == "tokens" and not drop_last:
        raise ValueError(
            "drop_last=False was given with batch_unit='tokens', where every step is full and what an epoch leaves "
            "comes first in the next one; leave drop_last out."
        )
    for name, value in (("microbatches", microbatches), ("balance_group", balance_group)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
        if batch_unit == "samples" and value is not None:
            raise ValueError(
                f"{name}={value} was given with batch_unit='samples', where as many microbatches are made as the "
                f"samples need; set batch_unit='tokens', or leave {name} out."
            )


def refuse_unlike_ranks(rank: int, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raises a DataError where a rank's settings are not those of rank 0, with which it would plan other steps."""
    unlike = [name for name in own if own[name] != first[name]]
    if unlike:
        here, there = (", ".join(f"{name}={of[name]!r}" for name in unlike) for of in (own, first))
        raise DataError(
            f"Rank {rank} has FlowDataModule({here}), but rank 0 has {there}. All ranks plan the same steps from the "
            "same settings: give the same values, and the same number to seed_everything, on every rank."
        )
