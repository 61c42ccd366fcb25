"""The self-test: passes entries between two processes, and says whether they arrive and what that takes."""

from __future__ import annotations

import multiprocessing
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from flowtrain_lightning.pool.counters import PoolCounters
from flowtrain_lightning.pool.entry import Key, entry_nbytes
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool import Pool
from flowtrain_lightning.pool.pool_errors import PoolError

_ELEMENTS = 4 << 20  # of the large entry, 16 MiB
_SMALL_ELEMENTS = 1 << 10  # of the small ones, 4 KiB
_LARGE_ENTRIES, _SMALL_ENTRIES = 8, 200
_LABELS = ("self-test owner", "self-test reader")


@dataclass(frozen=True)
class SelfTest:
    """The results of the self-test.

    Attributes:
        put_bytes_per_second: at which an entry of 16 MiB is written.
        passed_bytes_per_second: at which entries of 16 MiB pass, one after another, from put to release.
        round_trip_seconds: median from the put of a small entry until its release has come back, where both sides
            sleep while they wait.
        counters: of the owner.
    """

    put_bytes_per_second: float
    passed_bytes_per_second: float
    round_trip_seconds: float
    counters: PoolCounters


def self_test(timeout: float = 20.0, apart: bool = False) -> SelfTest:
    """Let this process put entries that a child of it reads and checks.

    Args:
        timeout: seconds after which it has failed.
        apart: as if the two ran on different hosts; the network is this machine's own.

    Raises:
        PoolError: when an entry did not come back in time, or came with wrong bytes.
    """
    deadline = time.monotonic() + timeout
    secret = secrets.token_hex() if apart else None
    with tempfile.TemporaryDirectory(prefix="flowtrain-") as folder:
        store = Path(folder) / "store"
        reader = multiprocessing.get_context("fork").Process(target=_read, args=(store, timeout, secret), daemon=True)
        reader.start()
        try:
            mesh = _connect(store, 0, timeout, secret)
            pool = Pool.open(mesh, entry_nbytes([_ELEMENTS * 4]), 0)
            try:
                return _measure(pool, deadline)
            finally:
                pool.close()
                mesh.close()
        finally:
            reader.join(max(deadline - time.monotonic(), 0.0))
            reader.kill()


def _measure(pool: Pool, deadline: float) -> SelfTest:
    writes, passes, rounds = [], [], []
    for item in range(_LARGE_ENTRIES + _SMALL_ENTRIES):
        large = item < _LARGE_ENTRIES
        tensor = _expected(item)
        start = time.perf_counter()
        pool.put(Key(0, 0, item), [tensor], [1])
        written = time.perf_counter()
        while pool.counters.current.now:
            pool.poll(1.0)
            if time.monotonic() > deadline:
                raise PoolError("The other process did not give an entry back in time. Is the machine overloaded?")
        if large:
            writes.append(written - start)
            passes.append(time.perf_counter() - start)
        else:
            rounds.append(time.perf_counter() - start)
    nbytes = _ELEMENTS * 4
    return SelfTest(nbytes / median(writes), nbytes / median(passes), median(rounds), pool.counters)


def _connect(store: Path, rank: int, timeout: float, secret: str | None) -> Mesh:
    """With a secret, as if each of the two ran on a host of its own."""
    address, location = ("127.0.0.1", f"host {rank}") if secret else (None, None)
    return Mesh.connect(FileStore(str(store), 2), rank, 2, _LABELS, timeout, address, location, secret)


def _read(store: Path, timeout: float, secret: str | None) -> None:
    """The child's part."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    mesh = _connect(store, 1, timeout, secret)
    pool = Pool.open(mesh, 0, 0)
    for item in range(_LARGE_ENTRIES + _SMALL_ENTRIES):
        while (lease := pool.get(Key(0, 0, item))) is None:
            pool.poll(1.0)
        if not torch.equal(lease.tensors[0], _expected(item)):
            mesh.page.fail(f"Entry {item} of the self-test came with wrong bytes.")
            return
        lease.release()
    pool.close()
    mesh.close()


def _expected(item: int) -> torch.Tensor:
    return torch.full((_ELEMENTS if item < _LARGE_ENTRIES else _SMALL_ELEMENTS,), float(item))
