"""A recipe that torchrun starts again after a rank was killed ends with the weights of a run without a break."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from flowtrain_lightning.checkpoint import read_checkpoint
from tests.lightning.layout_runs import launch
from tests.recipes.test_qwen_vl import SECONDS, fit_arguments, folder

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
FLOWTRAIN = str(Path(sys.executable).parent / "flowtrain")
STEPS = "8"

__all__ = ["folder"]  # a fixture


def command(folder: Path, kept: Path, root: Path) -> list[str]:
    """What a user types to train on two ranks, with three chances, from wherever the start before has come."""
    options = fit_arguments(folder, "config.yaml", None, 2)
    options[options.index("--trainer.max_steps") + 1] = STEPS
    options[options.index("--trainer.callbacks.init_args.dirpath") + 1] = str(kept)
    options[options.index("--trainer.default_root_dir") + 1] = str(root)
    roles = ["--trainer.strategy", "flowtrain_lightning.FlowTrainStrategy", "--trainer.strategy.encoder_ranks", "1"]
    restarts = [TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=2", "--no-python", FLOWTRAIN]
    return [*restarts, *options, *roles, "--ckpt_path", "last"]


def kill_a_rank(job: int) -> None:
    """Kills the process of rank 1."""
    for process in psutil.Process(job).children(recursive=True):
        if process.environ().get("RANK") == "1":
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError("there is no rank 1")


@pytest.mark.full
def test_a_rank_that_is_killed_under_torchrun_costs_no_bit(folder):
    ends = {}
    for name in ("killed", "whole"):
        kept, log = folder / name / "kept", folder / f"{name}.log"
        with launch(command(folder, kept, folder / name), log) as job:
            while name == "killed" and not (kept / "last.ckpt").exists():
                assert job.poll() is None, log.read_text()[-3000:]
                time.sleep(0.02)
            if name == "killed":
                kill_a_rank(job.pid)
            assert job.wait(SECONDS) == 0, log.read_text()[-3000:]
        ends[name] = read_checkpoint(kept / "last.ckpt")
    assert f'ckpt_path="last" is {folder}/killed/kept/' in (folder / "killed.log").read_text()
    killed, whole = ends["killed"], ends["whole"]
    assert killed["global_step"] == whole["global_step"] == int(STEPS)
    assert killed["state_dict"].keys() == whole["state_dict"].keys()
    assert all(torch.equal(weight, whole["state_dict"][name]) for name, weight in killed["state_dict"].items())
