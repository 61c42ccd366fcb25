"""Predicted memory, held against the peak of a process that trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowtrain_lightning.allocator import DEVICES, PRECISIONS, Cluster, RoleProblem
from flowtrain_lightning.allocator.coefficients import assumed_efficiency
from flowtrain_lightning.allocator.dimensions import backbone
from flowtrain_lightning.allocator.memory_use import memory_use
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.allocator.workload import RoleLoad

pytest.importorskip("torch")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "key_value_heads", "size", "layers", "vocabulary", "tokens"),
    [
        pytest.param(256, 1024, 8, 8, 32, 6, 4096, 3072, id="activations"),
        pytest.param(384, 1024, 6, 3, 64, 4, 24576, 1024, id="logits"),
        pytest.param(768, 2048, 12, 12, 64, 6, 8192, 512, id="weights"),
    ],
)
def test_a_training_process_peaks_within_a_tenth_of_the_prediction(
    hidden, inner, heads, key_value_heads, size, layers, vocabulary, tokens
):
    half = backbone(
        layers=layers,
        hidden=hidden,
        feed_forward=inner,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=size,
        vocabulary=vocabulary,
    )
    cluster = Cluster(DEVICES["cpu"], 1, 1)
    share, load = assumed_efficiency(cluster.device), RoleLoad(np.array([tokens]), 1, tokens, 1)
    problem = RoleProblem("backbone", half, load, False, cluster, PRECISIONS["32-true"], share)
    use = memory_use(problem, Family(np.ones(1)), np.array([float(tokens)]), np.ones(1))
    arguments = (hidden, inner, heads, key_value_heads, size, layers, vocabulary, tokens)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("train_decoder.py"), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert float((use.total - use.overhead)[0]) == pytest.approx(int(done.stdout), rel=0.1)
