"""The pool grows with the steps, and device memory with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.packing.step_members import TWO_ROLES
from flowtrain_lightning.pool import Key, Mesh, PoolError, Tier, open_device_tier
from flowtrain_lightning.runtime import pool_capacity
from flowtrain_lightning.runtime.pool_capacity import PoolCapacity, PoolSettings
from flowtrain_lightning.runtime.timeline import Timeline
from tests.pool.device.simulated import SimulatedRuntime, simulated
from tests.pool.ranks import meshes, on_all_ranks

MIB = 1 << 20


def capacity_of(mesh: Mesh) -> PoolCapacity:
    """A rank's, on the device that `open_device_tier` is given in place of a GPU."""
    job = SimpleNamespace(mesh=mesh, allocation=default_allocation(2), roles=("encoder",))
    compute = SimpleNamespace(specs={}, device=torch.device("cpu"))
    return PoolCapacity(torch.nn.Module(), job, compute, Timeline(), PoolSettings())  # type: ignore[arg-type]


def step(number: int, nbytes: int) -> Any:
    """A step that needs so many bytes for its largest encoder batch, and no more for the others."""
    program = SimpleNamespace(modalities=(), pool_demand=lambda specs: SimpleNamespace(least=nbytes, ample=nbytes))
    return SimpleNamespace(
        index=number, stage="train", program=program, plan=SimpleNamespace(entries=["one"], graph=TWO_ROLES)
    )


@pytest.fixture
def device():
    device = simulated(0)
    yield device
    device.close()


@pytest.fixture
def capacity(device: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch):
    """One rank's, on a device."""
    mesh = Mesh.connect(HashStore(), 0, 1, ["rank"])
    monkeypatch.setattr(
        pool_capacity, "choose_device_tier", lambda choice, mesh, _, nbytes: open_device_tier(mesh, device, nbytes)
    )
    capacity = capacity_of(mesh)
    yield capacity
    capacity.close()
    mesh.close()


def tier_of(capacity: PoolCapacity, number: int, nbytes: int) -> Tier:
    """Where an entry of so many bytes comes to lie."""
    assert capacity.context is not None
    pool, key = capacity.context.pool, Key(0, number, 0)
    address = pool.put(key, [torch.zeros(nbytes, dtype=torch.uint8)], [0])
    lease = pool.get(key)
    assert address is not None
    assert lease is not None
    lease.release()
    pool.poll()
    return address.tier


def test_entries_of_later_and_larger_steps_lie_in_device_memory_too(capacity, device):
    assert capacity.ensure_capacity(step(0, 1000), anew=False)
    assert tier_of(capacity, 0, 1000) is Tier.DEVICE
    with pytest.raises(PoolError, match="needs"):
        tier_of(capacity, 1, 20 * MIB)
    assert capacity.ensure_capacity(step(1, 20 * MIB), anew=False)
    assert [what for what, _ in device.closed] == ["freed"], "the block that was too small"
    assert tier_of(capacity, 2, 20 * MIB) is Tier.DEVICE
    assert not capacity.ensure_capacity(step(2, 1000), anew=False)
    assert capacity.counters is not None
    assert capacity.counters.fallbacks == 0


def test_every_rank_whose_entries_pass_through_host_memory_says_so(monkeypatch, caplog):
    devices = [simulated(rank) for rank in range(3)]
    devices[2].room = 0
    monkeypatch.setattr(
        pool_capacity,
        "choose_device_tier",
        lambda choice, mesh, _, nbytes: open_device_tier(mesh, devices[mesh.rank], nbytes),
    )
    with meshes(3) as made, caplog.at_level("INFO", "lightning.pytorch"):
        capacities = [capacity_of(mesh) for mesh in made]
        on_all_ranks(lambda rank: capacities[rank].ensure_capacity(step(0, 1000), anew=False), 3)
        told = [line for line in caplog.messages if "device memory of rank" in line]
        on_all_ranks(lambda rank: capacities[rank].close(), 3)
    for device in devices:
        device.close()
    assert len(told) == 3
    assert sum("rank 2 has no block (out of memory)" in line for line in told) == 2
    assert sum("rank 2 can make no block" in line for line in told) == 1
