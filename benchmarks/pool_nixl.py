"""How fast entries pass between hosts by NIXL, beside TCP: both in turn, over this machine's own network.

``python benchmarks/pool_nixl.py`` prints a table.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).parents[1]))

from flowtrain_lightning.pool import Key, Mesh, NetworkChoice, Pool, entry_nbytes

WAYS: tuple[NetworkChoice, ...] = ("auto", "nixl")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
DEADLINE = 60.0


def samples_of(nbytes: int) -> range:
    """The first two connect and touch memory, and do not count."""
    return range(27 if nbytes < 1 << 22 else 10)


def join(folder: str, rank: int) -> list[tuple[Mesh, Pool]]:
    """A mesh and a pool for each way, as if this rank had a host of its own."""
    torch.set_num_threads(1)
    joined = []
    for way in WAYS:
        store = FileStore(f"{folder}/{way}", 2)
        mesh = Mesh.connect(store, rank, 2, ["owner", "reader"], DEADLINE, "127.0.0.1", f"host {rank}", "known")
        joined.append((mesh, Pool.open(mesh, entry_nbytes([max(SIZES)]) if rank == 0 else 0, 0, way)))
    return joined


def leave(joined: list[tuple[Mesh, Pool]]) -> None:
    """Close all."""
    for mesh, pool in joined:
        pool.close()
        mesh.close()


def read(folder: str) -> None:
    """What the other process does: release each entry as soon as it is there, with the right bytes."""
    joined = join(folder, 1)
    for nbytes in SIZES:
        for sample in samples_of(nbytes):
            for _, pool in joined:
                while (lease := pool.get(Key(0, nbytes, sample))) is None:
                    pool.poll(1.0)
                assert lease.tensors[0].sum() == nbytes // 4
                lease.release()
    leave(joined)


def measure(joined: list[tuple[Mesh, Pool]]) -> dict[int, np.ndarray]:
    """Seconds from put to release, by size: a row per way, without what does not count."""
    found = {}
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4, dtype=torch.int32)
        seconds = np.zeros((len(WAYS), len(samples_of(nbytes))))
        for sample in samples_of(nbytes):
            for row, (_, pool) in enumerate(joined):
                start = time.perf_counter()
                pool.put(Key(0, nbytes, sample), [tensor], [1])
                while pool.counters.current.now:
                    pool.poll(1.0)
                seconds[row, sample] = time.perf_counter() - start
        found[nbytes] = seconds[:, 2:]
    return found


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        reader = multiprocessing.get_context("fork").Process(target=read, args=(folder,), daemon=True)
        reader.start()
        joined = join(folder, 0)
        found = measure(joined)
        leave(joined)
        reader.join(DEADLINE)
    print("|      bytes |       TCP |      NIXL | MB/s: TCP |  NIXL | TCP's time / NIXL's |")
    print("|-----------:|----------:|----------:|----------:|------:|--------------------:|")
    for nbytes, seconds in found.items():
        tcp, nixl = np.median(seconds, axis=1)
        speeds = f"{nbytes / tcp / 1e6:9,.0f} | {nbytes / nixl / 1e6:5,.0f}"
        ratio = float(np.median(seconds[0] / seconds[1]))
        print(f"| {nbytes:10,} | {tcp * 1e3:6.2f} ms | {nixl * 1e3:6.2f} ms | {speeds} | {ratio:19.2f} |")


if __name__ == "__main__":
    main()
