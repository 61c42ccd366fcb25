"""Five steps of data that meet every case: many pictures, one picture in the whole step, and none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain_lightning.data import FlowDataModule
from tests.tiny import tiny_data, write_records

GLOBAL_BATCH = 12
MIXED, ONE_PICTURE, NO_PICTURE = 0, 1, 2
"""Steps of the kind that their name says; the others are mixed."""

_PICTURES = (
    (1, 0, 2, 1, 0, 3, 1, 1, 0, 2, 1, 0),
    (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (2, 1, 1, 0, 1, 2, 0, 1, 3, 0, 1, 1),
    (1, 1, 0, 3, 0, 0, 1, 2, 0, 1, 0, 1),
)
STEPS = len(_PICTURES)


def write_steps(folder: Path) -> None:
    """Writes training records, in the order of the steps, and a few to validate on and to predict."""
    write_records(folder, GLOBAL_BATCH * STEPS, pictures_of=[count for step in _PICTURES for count in step])
    write_records(folder, 18, "val.jsonl", seed=1)
    write_records(folder, 9, "predict.jsonl", seed=2)


def steps_data(folder: Path, **settings: Any) -> FlowDataModule:
    """The steps above, in their order."""
    return tiny_data(folder, **{"shuffle": False, "global_batch_size": GLOBAL_BATCH, **settings})
