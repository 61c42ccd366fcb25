"""The scripts for several nodes start what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def stand_in(folder: Path, name: str, says: str) -> None:
    """A program of SLURM's."""
    program = folder / name
    program.write_text(f"#!/usr/bin/env bash\n{says}\n")
    program.chmod(0o755)


JOB = {"SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize("given", [[], ["--ckpt_path", "a.ckpt"]], ids=["goes on by itself", "from a checkpoint"])
def test_under_slurm_every_task_trains_on_the_nodes_of_the_job(tmp_path, given):
    stand_in(tmp_path, "srun", 'printf "%s\\n" "$@"')
    said = run("slurm.sh", "--config", "a file.yaml", *given, **JOB, PATH=f"{tmp_path}:{PATH}").stdout.splitlines()
    from_where = given or ["--ckpt_path", "last"]
    wanted = [
        "flowtrain",
        "fit",
        "--config",
        "a file.yaml",
        *from_where,
        "--trainer.num_nodes=4",
        "--trainer.devices=2",
    ]
    assert said[1:] == wanted


def test_under_slurm_tasks_may_run_in_a_container(tmp_path):
    stand_in(tmp_path, "srun", 'printf "%s\\n" "$@"')
    said = run("slurm.sh", **JOB, CONTAINER="image.sqsh", PATH=f"{tmp_path}:{PATH}").stdout.splitlines()
    assert "--container-image=image.sqsh" in said[: said.index("flowtrain")]


def test_a_job_whose_time_is_over_tells_its_tasks_waits_for_them_and_is_queued_again(tmp_path):
    stand_in(
        tmp_path,
        "srun",
        f"touch {tmp_path}/runs; until [ -e {tmp_path}/told ]; do sleep .1; done; sleep .3; echo saved",
    )
    stand_in(tmp_path, "scancel", f'[ "$*" = "--signal=USR1 17" ] && touch {tmp_path}/told')
    stand_in(tmp_path, "scontrol", 'echo "$@"')
    environment = {**os.environ, **JOB, "PATH": f"{tmp_path}:{PATH}"}
    command = [str(SCRIPTS / "slurm.sh")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        until = time.monotonic() + 30
        while not (tmp_path / "runs").exists() and time.monotonic() < until:
            time.sleep(0.1)
        script.send_signal(signal.SIGUSR1)
        said, _ = script.communicate(timeout=30)
    assert said.split("\n") == ["saved", "requeue 17", ""]
    assert script.returncode == 0


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
