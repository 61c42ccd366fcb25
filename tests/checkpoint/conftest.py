"""The runs that several files of these tests look at, each made once, when first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning import export_checkpoint
from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.checkpoint import save_checkpoint
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from tests.checkpoint.saving import HALVES
from tests.checkpoint.training import LAYOUTS, SAVED_AT, write_data
from tests.forks import Done, Job, run_jobs


@dataclass(frozen=True)
class Runs:
    """Trainings in processes of their own.

    Attributes:
        folder: where each run has its folder; ``data`` is what they all train on.
    """

    folder: Path
    done: dict[str, Done] = field(default_factory=dict)

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def job(self, name: str, target: str, ranks: int, **arguments: Any) -> Done:
        """Runs a function of ``training`` in so many processes, unless that was done."""
        if name not in self.done:
            job = Job(name, f"tests.checkpoint.training:{target}", ranks, {"data": self.data, **arguments})
            self.done.update(run_jobs(self.folder, [job]))
        return self.done[name]

    def straight(self, case: str, layout: str) -> Path:
        """The folder of a run without a break, which saved ``step3.ckpt`` on its way."""
        name = f"{case} on {layout}"
        arguments = {"case": case, "layout": layout, "saves": [SAVED_AT]}
        return self.job(name, "train", LAYOUTS[layout][0], **arguments).check().folder

    def resumed(self, checkpoint: Path, case: str, layout: str, saves_at: int = SAVED_AT + 2) -> Path:
        """The folder of a run that went on from a checkpoint, and saved another one, such as ``step5.ckpt``."""
        name = f"{case} on {layout} from {checkpoint.stem} of {checkpoint.parent.name}"
        arguments = {"case": case, "layout": layout, "resume": str(checkpoint), "saves": [saves_at]}
        return self.job(name, "train", LAYOUTS[layout][0], **arguments).check().folder

    def exported(self, checkpoint: Path) -> Path:
        """The checkpoint as a plain file."""
        file = self.folder / "exported" / checkpoint.name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            export_checkpoint(checkpoint, file)
        return file


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_data(folder / "data")
    return Runs(folder)


def seen_by(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank wrote at the end of its run."""
    return torch.load(folder / f"rank{rank}.pt", weights_only=True)


@pytest.fixture
def alone():
    return groups_alone()


def groups_alone() -> Groups:
    """The groups of a process on its own."""
    cross = CrossGroup(None, 0, 1, timedelta(seconds=1))  # type: ignore[arg-type]
    return Groups(cross, cross, cross, 0, 1, None, JobKey(b"alone"), iter(()))


def saved_alone(path: Path, alone: Groups, **rest: Any) -> Path:
    """A checkpoint of one process; without weights, unless ``state_dict`` holds some."""
    save_checkpoint({"state_dict": {}, **rest}, path, HALVES, default_allocation(1), alone)
    return path
