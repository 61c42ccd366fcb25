"""How a run ends before its time: asked to by a signal, or by a mistake in the user's code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.forks import Job, run_jobs
from tests.lightning.layout_runs import launch
from tests.lightning.run_context import RunContext
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("long_run.py")
SECONDS = 400
"""The longest wait for a start on a busy machine."""

LAUNCHERS = {"lightning": (), "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")}


def test_sigterm_to_one_rank_ends_all_with_a_checkpoint_that_resumes(one_rank, data_folder):
    arguments = {"data_folder": str(data_folder), "place": "sigterm"}
    job = Job("ended", "tests.lightning.long_run:train", 2, arguments, deadline=SECONDS)
    done = run_jobs(one_rank.folder, [job])["ended"].check()
    assert "received SIGTERM; saved" in done.log
    _resume(one_rank, done.folder / "preempted.ckpt")


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "rank"), [("lightning", 1), ("torchrun", 0)])
def test_so_it_does_however_the_ranks_were_started(one_rank, data_folder, launcher, rank):
    folder = one_rank.folder
    command = [sys.executable, *LAUNCHERS[launcher], str(SCRIPT), str(folder), str(data_folder)]
    with launch(command, folder / "log") as process:
        _wait_until(lambda: (folder / f"pid-{rank}").exists() or process.poll() is not None)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (folder / "log").read_text()
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert "received SIGTERM; saved" in (folder / "log").read_text()
    _resume(one_rank, folder / "preempted.ckpt")


def _resume(context: RunContext, checkpoint: Path) -> None:
    """Goes on from a checkpoint, in this process and on another layout."""
    steps = []

    class Resumed(TinyVLM):
        def on_train_start(self) -> None:
            steps.append(self.trainer.global_step)

    trainer = context.trainer(max_epochs=100_000, limit_train_batches=5, limit_val_batches=0, max_time="00:00:00:01")
    former = signal.getsignal(signal.SIGTERM)
    trainer.fit(Resumed(), context.data(), ckpt_path=checkpoint)
    assert steps[0] >= 3
    assert trainer.global_step > steps[0]
    assert signal.getsignal(signal.SIGTERM) == former


@pytest.mark.parametrize(("place", "rank", "role"), [("encode", 1, "encoder 0"), ("loss", 0, "backbone 0")])
def test_a_mistake_in_the_users_code_ends_all_ranks_and_each_shows_its_traceback(
    tmp_path, data_folder, place, rank, role
):
    printed = _fail(tmp_path, data_folder, place)
    for text in printed:
        assert f"ZeroDivisionError: a mistake in the user's {place}" in text
        assert f"in {place}\n    self._fail(" in text
    assert f"Rank {rank} ({role})" in printed[1 - rank]


def test_different_names_on_two_ranks_are_told(tmp_path, data_folder):
    for text in _fail(tmp_path, data_folder, "names"):
        assert (
            "log('gradients_on_rank_1', ...) was called on rank 1 while rank 0 calls log('gradients_on_rank_0'" in text
        )


LONGER = [pytest.param(place, marks=pytest.mark.full) for place in ("epoch", "step of colocated ranks")]


@pytest.mark.parametrize("place", ["step", "validation", *LONGER])
def test_who_logs_alone_is_told_so_within_seconds_and_how_rank_zero_may(tmp_path, data_folder, place):
    for text in _fail(tmp_path, data_folder, f"log after a {place}", seconds=40):
        assert "log('note', ...) was called on rank 0 (" in text
        assert " 0), but rank 1 (encoder " in text
        assert ") has gone on without it, to phase '" in text
        assert "where rank 0 alone shall log, with rank_zero_only=True." in text


def test_a_spike_of_the_loss_ends_all_ranks_and_the_batches_are_written_down(tmp_path, data_folder):
    for text in _fail(tmp_path, data_folder, "spike"):
        assert "TrainingSpikeException" in text
    assert json.loads((tmp_path / "failed" / "skip.json").read_text()) == [2, 3]


def _fail(folder: Path, data_folder: Path, place: str, seconds: float = SECONDS) -> list[str]:
    """What each of two ranks printed when something went wrong in one."""
    arguments = {"data_folder": str(data_folder), "place": place}
    job = Job("failed", "tests.lightning.long_run:train", 2, arguments, deadline=seconds)
    done = run_jobs(folder, [job])["failed"]
    assert all(code not in (0, -signal.SIGKILL) for code in done.codes), done
    return [(done.folder / f"rank{rank}.log").read_text() for rank in range(2)]


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
