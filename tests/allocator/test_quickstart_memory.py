"""Predicted memory of whole processes, held against the ranks of the quickstart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowtrain_lightning.allocator import (
    WHOLE_COPIES,
    Cluster,
    ModelledCosts,
    Workload,
    describe_dimensions,
    named_device,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import joint_bytes
from tests.paths import python_path

torch = pytest.importorskip("torch")

MODULE = describe_dimensions(
    {
        "name": "quickstart",
        "encoders": {
            "image": {
                "layers": 4,
                "hidden": 128,
                "feed_forward": 341,
                "heads": 4,
                "patch": 8,
                "merge": 2,
                "gated": True,
                "projector_width": 512,
                "output": 8,
            }
        },
        "backbone": {"layers": 4, "hidden": 192, "feed_forward": 512, "heads": 4, "vocabulary": 1024},
    }
)


def predicted(placement):
    """What each rank holds -> bytes."""
    # As the quickstart's data are: 47 tokens a sample, and in most a picture of 40 to 64 patches.
    workload = Workload(
        np.full(100, 47), {"image": np.full(100, 55)}, global_batch_size=16, token_budget=256, encoder_budget=330
    )
    problems = role_problems(MODULE, workload, Cluster(named_device("cpu"), 2, 2), "32-true")
    plan = next(plan for plan in ModelledCosts(problems, WHOLE_COPIES).predictions() if plan.kind == placement)
    of_roles = {role: sum(chosen.details(problems[role]).memory.at(0).values()) for role, chosen in plan.chosen.items()}
    if placement == "separate":
        return of_roles
    return {"encoder+backbone": joint_bytes(problems, of_roles)}


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the model does not know the libraries for GPUs")
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_the_quickstarts_ranks_peak_within_a_tenth_of_the_prediction(placement, tmp_path):
    subprocess.run(
        [sys.executable, Path(__file__).with_name("train_quickstart.py"), placement, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        stdout=subprocess.DEVNULL,
        timeout=600,
        check=True,
    )
    expected = predicted(placement)
    for rank in range(2):
        held, peak = (tmp_path / f"rank{rank}.txt").read_text().split()
        assert expected[held] == pytest.approx(int(peak), rel=0.1)
