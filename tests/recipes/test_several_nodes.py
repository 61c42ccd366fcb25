"""The scripts for several nodes start what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lightning.layout_runs import launch
from tests.ports import free_port
from tests.recipes.test_qwen_vl import SECONDS, fit_arguments, folder

SCRIPTS = Path(__file__).parents[2] / "recipes" / "several_nodes"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize("script", ["slurm.sh", "torchrun.sh"])
def test_it_is_a_script_that_bash_understands_and_may_run(script):
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)
    assert os.access(SCRIPTS / script, os.X_OK)


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env={**outside, **environment}, capture_output=True, text=True, check=False)


def test_under_slurm_every_task_trains_on_the_nodes_of_the_job(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    job = {"SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "2", "PATH": f"{tmp_path}:{PATH}"}
    said = run("slurm.sh", "--config", "a file.yaml", **job).stdout.splitlines()
    assert said[1:] == ["flowtrain", "fit", "--config", "a file.yaml", "--trainer.num_nodes=4", "--trainer.devices=2"]


def test_what_is_missing_is_said():
    assert "start it with sbatch" in run("slurm.sh").stderr
    assert "say how many nodes there are" in run("torchrun.sh", "0", MASTER="localhost").stderr
    assert "say which node this is" in run("torchrun.sh", NODES="2", MASTER="localhost").stderr


@pytest.mark.full
def test_torchrun_trains_on_two_nodes(folder):
    _, *options = fit_arguments(folder, "config.yaml", None, 1)
    where = {"NODES": "2", "MASTER": "127.0.0.1", "PORT": str(free_port()), "GPUS": "1", "PATH": PATH}
    options[options.index("--trainer.num_nodes") + 1] = "2"
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                launch([str(SCRIPTS / "torchrun.sh"), str(node), *options], folder / f"log{node}", **where)
            )
            for node in range(2)
        ]
        codes = [node.wait(SECONDS) for node in nodes]
    assert codes == [0, 0], "\n".join((folder / f"log{node}").read_text()[-3000:] for node in range(2))
    assert list((folder / "runs").rglob("last.ckpt"))
