"""What every test gets: one thread, no trace of the test before it, and the folder of real data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the scripts that tests start

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from lightning_utilities.core.rank_zero import rank_zero_only

from flowtrain_lightning.runtime.groups import disconnect_groups

torch.set_num_threads(1)
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _no_trace_of_a_trainer() -> Iterator[None]:
    """Puts back what a Trainer in this process leaves behind: process groups, the global rank, environment variables.

    Threads of process groups do not outlive a fork, and `Ranks` forks.
    """
    rank, environment = getattr(rank_zero_only, "rank", 0), dict(os.environ)
    yield
    disconnect_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    rank_zero_only.rank = rank
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data: ``FLOWTRAIN_DATA``, or ``shared/data`` beside the checkout."""
    folder = Path(os.environ.get("FLOWTRAIN_DATA", Path(__file__).parents[1] / "../shared/data"))
    if not folder.is_dir():
        pytest.skip("there is no real data here; set FLOWTRAIN_DATA to a folder that holds mini_vl")
    return folder
