"""How long two ranks take to sum gradients is measured, and nothing stays of them."""

import multiprocessing
import time

import pytest
import torch.distributed as dist

from flowtrain_lightning.placement.gradient_reduction import measure_reduction
from flowtrain_lightning.placement.profile import ProfileError
from tests.pool.faults import slowness

DEADLINE = 150.0
"""Seconds in which a busy machine, too, starts two interpreters that import torch."""


def test_summing_more_takes_longer_and_leaves_no_process_beside_a_process_group(tmp_path):
    others = set(multiprocessing.active_children())  # of tests before this one
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        reduction = measure_reduction(DEADLINE)
    finally:
        if alone:
            dist.destroy_process_group()
    assert reduction.ranks == 2
    assert 0 < reduction.seconds(1 << 20) < reduction.seconds(1 << 28)
    assert others.issuperset(multiprocessing.active_children())


def test_ranks_that_take_too_long_are_ended_with_a_sentence():
    start, others = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(ProfileError, match=r"did not sum gradients: they failed, or took more than 0\.01 s"):
        measure_reduction(deadline=0.01)
    assert time.monotonic() - start < 10 * slowness()
    assert others.issuperset(multiprocessing.active_children())
