"""Meshes and pools for tests: several ranks in one process, driven in turn, or one rank of a real job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

import pytest
from torch.distributed import FileStore, HashStore

from flowtrain_lightning.pool import DeviceTier, Lease, Mesh, NetworkChoice, Pool, StatusPage, open_device_tier
from flowtrain_lightning.pool.control_records import ControlRecord, inbox_bytes
from flowtrain_lightning.pool.rendezvous import RankConnections, connect_ranks
from tests.pool.device.simulated import SimulatedRuntime, simulated

Made = TypeVar("Made")

SECRET = "that all ranks of the tests know"

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed (extra `nixl`)")
)
"""The name of the transport that is optional, for tests that go through several."""


def labels(ranks: int) -> list[str]:
    """Rank 0 is a backbone rank, the others are encoder ranks."""
    return ["backbone 0", *(f"encoder {rank}" for rank in range(ranks - 1))]


def on_all_ranks(make: Callable[[int], Made], ranks: int) -> list[Made]:
    """What ``make(rank)`` returns when all ranks call it at once, as collective moments need."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(make, range(ranks)))


def location_of(transport: str, rank: int) -> dict[str, str]:
    """Where a rank claims to run: ``"both"`` shares out two hosts; all others that need some give each rank its own."""
    if transport not in ("network", "both", "nixl"):
        return {}
    return {"address": "127.0.0.1", "location": f"host {rank % 2 if transport == 'both' else rank}", "secret": SECRET}


def network(transport: str) -> NetworkChoice:
    """What to ask for between hosts."""
    return "nixl" if transport == "nixl" else "auto"


_devices: dict[Mesh, tuple[SimulatedRuntime, DeviceTier]] = {}
_to_close: dict[Mesh, list[Pool]] = {}  # whose NIXL would not work in a process that is forked while they are open


def open_pool(mesh: Mesh, current_bytes: int, ahead_bytes: int, transport: str, late: bool = False) -> Pool:
    """The pool of one rank; with ``"device"`` over a simulated one, whose memory holds half of what the pool does.

    ``late``: not only the pool's copies but all work that the rank gives to its device is done some time later.
    """
    if transport != "device":
        pool = Pool.open(mesh, current_bytes, ahead_bytes, network(transport))
        if transport == "nixl":
            _to_close.setdefault(mesh, []).append(pool)
        return pool
    if mesh not in _devices:
        runtime = simulated(mesh.rank, late)
        _devices[mesh] = runtime, open_device_tier(mesh, runtime, (current_bytes + ahead_bytes) // 2)
    return Pool.open(mesh, current_bytes, ahead_bytes, device=_devices[mesh][1])


@contextmanager
def meshes(ranks: int, transport: str = "shared_memory") -> Iterator[list[Mesh]]:
    """Connected meshes of ``ranks`` ranks, all in this process."""
    store = HashStore()

    def connect(rank: int) -> Mesh:
        return Mesh.connect(store, rank, ranks, labels(ranks), timeout=60, **location_of(transport, rank))

    made = on_all_ranks(connect, ranks)
    try:
        yield made
    finally:
        on_all_ranks(lambda rank: made[rank].close(), ranks)
        for mesh in made:
            for pool in _to_close.pop(mesh, []):
                pool.close()
            if mesh in _devices:
                _devices.pop(mesh)[0].close()


@contextmanager
def mesh_and_bare_peer(transport: str = "shared_memory") -> Iterator[tuple[Mesh, RankConnections]]:
    """The mesh of rank 0, and the bare connections of a rank 1 that says whatever a test lets it say."""
    store, wake_event = HashStore(), os.eventfd(0)
    _, descriptor = StatusPage.create(1, labels(2)[1], inbox_bytes(2))

    def connect(rank: int) -> Mesh | RankConnections:
        if rank == 0:
            return Mesh.connect(store, 0, 2, labels(2), timeout=60, **location_of(transport, 0))
        return connect_ranks(store, 1, labels(2), descriptor, wake_event, 60, **location_of(transport, 1))

    mesh, peer = on_all_ranks(connect, 2)
    try:
        yield mesh, peer
    finally:
        mesh.close(goodbye=False)
        for local in peer.local.values():
            local.close()
        if peer.remote is not None:
            peer.remote.close()
        os.close(descriptor)
        os.close(wake_event)


def device_of(mesh: Mesh) -> SimulatedRuntime:
    """The simulated device of a rank whose pool uses one."""
    return _devices[mesh][0]


def open_pools(made: list[Mesh], current_bytes: int, ahead_bytes: int, transport: str) -> list[Pool]:
    """A pool on every rank of these meshes."""
    return on_all_ranks(lambda rank: open_pool(made[rank], current_bytes, ahead_bytes, transport), len(made))


def join_job(rank: int, ranks: int, timeout: float = 60.0, **where: str) -> Mesh:
    """The mesh of one process that `tests.processes` started; ``where`` is its address and location."""
    store = FileStore(os.path.join(os.environ["FOLDER"], "store"), ranks)
    return Mesh.connect(store, rank, ranks, labels(ranks), timeout, **{"secret": SECRET, **where})


def wait_for(pool: Pool, done: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll until ``done()``."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "nothing came in time"
        pool.poll(0.5)


def lease_of(pool: Pool, key: tuple[int, int, int], seconds: float = 60.0) -> Lease:
    """The lease of an entry, waited for."""
    end = time.monotonic() + seconds
    while (lease := pool.get(key)) is None:
        assert time.monotonic() < end, f"{key} did not come in time"
        pool.poll(0.5)
    return lease


def receive_all(mesh: Mesh, count: int, seconds: float = 60.0) -> list[ControlRecord]:
    """The records that came until there were ``count``, or until the time was over."""
    got: list[ControlRecord] = []
    end = time.monotonic() + seconds
    while len(got) < count and time.monotonic() < end:
        got.extend(mesh.receive(0.2))
    return got
