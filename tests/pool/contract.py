"""What the tests of the pool's contract share: its transports, the sizes of pool and entry, and short words."""

import pytest
import torch

from flowtrain_lightning.pool import entry_nbytes
from tests.pool.ranks import NIXL

TRANSPORTS = [
    "both",  # of three ranks, two share memory
    "device",
    NIXL,
    *(pytest.param(transport, marks=pytest.mark.full) for transport in ("shared_memory", "network")),
]
CAPACITY = 1 << 20
"""Bytes of a rank's part of the pool for the step that runs."""
FLOATS = entry_nbytes([1000 * 4])
"""Bytes that an entry of :func:`floats` takes there."""


def floats(value=1.0):
    """An entry's tensor."""
    return torch.full((1000,), float(value))


def now(pool):
    """Bytes of a rank's part that are taken."""
    return pool.counters.current.now


def serve(pools):
    """Let every rank take in what is on its way."""
    for _ in range(3):
        for pool in pools:
            pool.poll(0.02)
