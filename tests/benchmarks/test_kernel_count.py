"""`benchmarks/kernel_count.py` counts what starts a kernel, and what a backward computes again."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.gpu_model import TINY
from benchmarks.kernel_count import CountKernels, count


def test_operations_that_only_look_at_memory_otherwise_count_for_nothing():
    rows = torch.empty(4, 6, device="meta")
    with CountKernels() as counted:
        rows.t()[1:].view(5, 2, 2).expand(3, 5, 2, 2).detach()
        torch.empty_like(rows)
        (rows + rows).mul_(2.0)
        torch.mm(rows, rows.t())
    found = counted.summary()
    assert found["operations"] == 3
    assert found["product_bytes"] == 4 * (24 + 24 + 16)
    assert found["most"] == {"add": [1, 4 * 48], "mul_": [1, 4 * 24]}


def test_what_is_recomputed_is_counted_again():
    kept, selective, full = (count(TINY, recompute, images=2) for recompute in (False, "selective", True))
    assert kept["operations"] < selective["operations"] < full["operations"]
    assert kept["product_bytes"] == selective["product_bytes"] < full["product_bytes"]
    assert kept["casts"] > 0
