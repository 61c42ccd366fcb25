"""What the doctor says of device memory: it is tried out between two processes, or there is no GPU."""

from __future__ import annotations

import os
from importlib.metadata import metadata

import pytest
import torch

from flowtrain_lightning.cli.doctor_command import OPTIONAL, examine, examine_device_tier
from tests.pool.device.simulated import simulated


def blind(rank):
    """Process 1 can open no block."""
    return simulated(rank, blind=rank == 1)


def ends(rank):
    """A driver that ends its process."""
    os._exit(3)


@pytest.mark.full  # two fresh interpreters; `tests/pool/device` tries the same in forks
def test_device_memory_that_two_processes_can_read_is_found():
    found = examine_device_tier(simulated)
    assert found.found
    assert "pass between processes in GPU memory, by CUDA IPC" in found.meaning


@pytest.mark.full
@pytest.mark.parametrize(
    ("make_runtime", "reason"),
    [
        (blind, "rank 1 cannot read the block of rank 0 (invalid device context)"),
        (ends, "a process that opens it ended at once"),
    ],
)
def test_where_they_cannot_it_is_said_why(make_runtime, reason):
    found = examine_device_tier(make_runtime)
    assert not found.found
    assert reason in found.meaning
    assert found.meaning.endswith(": features and gradients go through host memory")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    (found,) = (finding for finding in examine() if finding.name == "device tier")
    assert str(found).split(maxsplit=3)[2:] == ["absent", found.meaning]
    assert found.meaning.startswith("no GPU: ")


OF_SEVERAL = {"quickstart", "beside-hf", "docs", "test"}
"""Extras that gather others, or are for this project's own pages and tests."""


def test_every_extra_is_named_with_what_it_is_for():
    extras = set(metadata("flowtrain-lightning").get_all("Provides-Extra") or ())
    assert {extra for _, extra in OPTIONAL.values()} == extras - OF_SEVERAL
