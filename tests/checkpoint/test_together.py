"""Where there is no room for a checkpoint all ranks say so; nothing of it is left, and the one before is whole."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowtrain_lightning.checkpoint import read_checkpoint
from flowtrain_lightning.checkpoint.together import written_together
from flowtrain_lightning.parallel.groups import CrossGroup
from tests.checkpoint.conftest import seen_by
from tests.checkpoint.training import STEPS
from tests.forks import Job, read_down, run_jobs


@pytest.mark.parametrize("most_bytes", [0, 300, 3_000], ids="{} bytes".format)
@pytest.mark.parametrize("victim", [0, 1], ids="rank {}".format)
def test_all_ranks_name_the_one_without_room_and_a_later_save_succeeds(tmp_path, victim, most_bytes):
    arguments = {"victim": victim, "most_bytes": most_bytes}
    job = Job("full", "tests.checkpoint.saving:save_where_no_room_is_left", 2, arguments)
    done = run_jobs(tmp_path, [job])["full"].check()
    path = done.folder / "kept" / "last.ckpt"
    for seen in read_down(done.folder):
        assert seen["told"].startswith(f"The checkpoint {path} was not saved; rank {victim} could not write its part: ")
        assert f" MB are free in {path.parent}). Nothing is left of it, and earlier checkpoints" in seen["told"]
        assert (
            'ModelCheckpoint(dirpath=...)), and go on from the one before: fit(..., ckpt_path="last").' in seen["told"]
        )
        assert (seen["left"], seen["kept"]) == (["last.ckpt"], 1)
    assert read_checkpoint(path)["epoch"] == 3


def test_an_error_that_is_not_about_writing_waits_for_nobody(tmp_path):
    nobody: Any = None  # whom it would have to ask
    with (
        pytest.raises(RuntimeError, match="DataLoader worker"),
        written_together(tmp_path, nobody),
    ):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


def test_an_error_of_the_system_is_about_writing_whatever_it_says(tmp_path):
    cross = CrossGroup(dist.HashStore(), 0, 1, timedelta(seconds=5))
    with (
        pytest.raises(OSError, match=r"was not saved; rank 0 could not write its part: of no errno \("),
        written_together(tmp_path / "last.ckpt", cross),
    ):
        raise OSError("of no errno")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_ends_with_that_sentence_and_goes_on_from_the_checkpoint_before(runs, rank):
    ended = runs.job(f"full on rank {rank}", "train_until_the_disk_is_full", 2, rank=rank)
    assert ended.codes == [1, 1], ended.log
    assert [path.name for path in (ended.folder / "kept").iterdir()] == ["last.ckpt"]
    assert {path.suffix for path in ended.folder.glob("fault-*")} == {".txt"}
    for file in ended.folder.glob("fault-*"):
        assert f"last.ckpt was not saved; rank {rank} could not write its part: " in file.read_text()
    assert read_checkpoint(ended.folder / "kept" / "last.ckpt")["global_step"] == 2
    went_on = runs.job(f"after full on rank {rank}", "go_on_after_fault", 2, killed=str(ended.folder)).check()
    straight = seen_by(runs.straight("adamw", "1+1"))
    assert list(seen_by(went_on.folder)["steps"]) == list(range(3, STEPS + 1))
    for name, weight in seen_by(went_on.folder)["weights"].items():
        assert torch.equal(weight, straight["weights"][name])
