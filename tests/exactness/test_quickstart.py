"""On real pictures the loss curves of all layouts lie on one another."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.exactness.layouts import ranks_of
from tests.exactness.quickstart import STEPS
from tests.forks import Job, run_jobs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def losses(folder: Path, layout: str) -> list[float]:
    job = Job(layout, "tests.exactness.quickstart:train", ranks_of(layout), {"layout": layout})
    done = run_jobs(folder, [job])[layout].check()
    with (done.folder / "log" / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of one process."""
    return losses(folder, "auto")


@pytest.mark.parametrize("layout", ["ddp 2", "colocated 2", "1+1", "1+2"])
def test_the_loss_curve_of_the_quickstart_is_that_of_one_process(folder, alone, layout):
    assert len(alone) == STEPS
    assert alone[-1] < 0.5 * alone[0]
    assert losses(folder, layout) == pytest.approx(alone, rel=1e-4)
