"""Layers that PyTorch's own compiler compiles for a CPU: soon enough, and computing what they computed before."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
import torch

from tests.exactness.compare import error, read_run
from tests.exactness.data import write_steps
from tests.forks import Job, read_down, run_jobs, write_down

pytest.importorskip("transformers")
from tests.models.training import train

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler"),
]

SECONDS = 180
"""CPU time of this process and of the compilers that it starts."""


def train_compiled(folder: Path, *, data: str, compile: str, recompute: str | bool) -> None:
    """Trains on the only rank, and writes down the CPU seconds of it."""
    torch._inductor.config.compile_threads = 1  # here, where its time is counted
    torch._inductor.config.force_disable_caches = True
    train(
        folder,
        data=data,
        layout="colocated 1",
        family="qwen2_5_vl",
        precision="32-true",
        compile=compile,
        recompute=recompute,
    )
    spent = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    write_down(folder, sum(each.ru_utime + each.ru_stime for each in spent))


@pytest.mark.parametrize("recompute", [False, "selective"])
def test_compiled_layers_of_qwen_train_exactly_and_compile_within_three_minutes(tmp_path, recompute):
    write_steps(tmp_path / "data")
    runs = {}
    for compile in ("none", "blocks"):
        arguments = {"data": str(tmp_path / "data"), "compile": compile, "recompute": recompute}
        job = Job(compile, "tests.models.test_compiled_layers:train_compiled", 1, arguments, deadline=1500)
        folder = run_jobs(tmp_path, [job])[compile].check().folder
        runs[compile], (seconds,) = read_run(folder), read_down(folder)
    assert error(runs["blocks"].gradients[0], runs["none"].gradients[0]) <= 1e-5
    assert runs["blocks"].losses == pytest.approx(runs["none"].losses, rel=1e-3)  # AdamW makes much of little gradients
    assert seconds <= SECONDS
