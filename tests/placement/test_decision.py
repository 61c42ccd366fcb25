"""What is kept of the allocation that a run takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.placement import PlacementDecision

SETTLED = PlacementDecision(default_allocation(2), "it was asked for")


def test_loggers_get_allocation_and_reason():
    kept = {}
    trainer = SimpleNamespace(loggers=[SimpleNamespace(log_hyperparams=kept.update)])
    SETTLED.record(trainer, "s3://a-bucket")  # where no file can be written
    assert kept == {
        "allocation": "separate: encoder on rank 1 (data 1, replicate); backbone on rank 0 (data 1, replicate)",
        "allocation_reason": "it was asked for",
    }


def test_the_file_says_why_and_can_be_read_back(tmp_path):
    SETTLED.record(SimpleNamespace(loggers=[]), str(tmp_path / "new"))
    path = tmp_path / "new" / "allocation.yaml"
    assert "because it was asked for." in path.read_text()
    assert read_plan(path) == SETTLED.allocation


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="allocation is not kept as a file"):
        SETTLED.record(SimpleNamespace(loggers=[]), str(tmp_path / "file" / "folder"))
