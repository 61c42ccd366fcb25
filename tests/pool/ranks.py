"""Meshes and pools for tests: several ranks in one process, driven in turn, or one rank of a real job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed import FileStore, HashStore

from flowtrain_lightning.pool import Lease, Mesh, Pool

Made = TypeVar("Made")


def labels(ranks: int) -> list[str]:
    """Rank 0 is a backbone rank, the others are encoder ranks."""
    return ["backbone 0", *(f"encoder {rank}" for rank in range(ranks - 1))]


def on_all_ranks(make: Callable[[int], Made], ranks: int) -> list[Made]:
    """What ``make(rank)`` returns when all ranks call it at once, as collective moments need."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(make, range(ranks)))


@contextmanager
def meshes(ranks: int) -> Iterator[list[Mesh]]:
    """Connected meshes of ``ranks`` ranks, all in this process."""
    store = HashStore()
    made = on_all_ranks(lambda rank: Mesh.connect(store, rank, ranks, labels(ranks), timeout=20), ranks)
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()


def open_pools(made: list[Mesh], current_bytes: int, ahead_bytes: int, transport: str) -> list[Pool]:
    """A pool on every rank of these meshes."""
    return on_all_ranks(lambda rank: Pool.open(made[rank], current_bytes, ahead_bytes, transport), len(made))


def join_job(rank: int, ranks: int, timeout: float = 60.0) -> Mesh:
    """The mesh of one process that `tests.processes` started."""
    store = FileStore(os.path.join(os.environ["FOLDER"], "store"), ranks)
    return Mesh.connect(store, rank, ranks, labels(ranks), timeout)


def wait_for(pool: Pool, done: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll until ``done()``."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "nothing came in time"
        pool.poll(0.5)


def lease_of(pool: Pool, key: tuple[int, int, int], seconds: float = 20.0) -> Lease:
    """The lease of an entry, waited for."""
    end = time.monotonic() + seconds
    while (lease := pool.get(key)) is None:
        assert time.monotonic() < end, f"{key} did not come in time"
        pool.poll(0.5)
    return lease
