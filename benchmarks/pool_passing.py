"""How fast entries pass from one process to another on one device, beside a plain copy there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from flowtrain_lightning.pool import Address, Key, Lease, Mesh, Pool, Tier, choose_device_tier, entry_nbytes, runtime_of

MIB = 1 << 20
SIZES = {16 * MIB: 100, 64 * MIB: 50, 256 * MIB: 20}
"""Bytes of an entry -> how many pass in a round, one behind the other."""

TINY_SIZES = {64 << 10: 5, MIB: 3}

ROUNDS = 5
_IN_FLIGHT = 4  # entries of the largest size that the pool holds
_WAIT_SECONDS = 1.0
_OWNER, _READER = range(2)
_ENTRY, _ANSWER = range(2)  # channels of keys


def measure_passing(
    rank: int, folder: Path, device: torch.device, sizes: Mapping[int, int], rounds: int = ROUNDS
) -> list[dict[str, float]]:
    """What the owner, rank 0, finds of every size; rank 1 reads, and returns nothing.

    In a round the owner copies tensors on the device, and the reader rests; then the owner puts as many into the pool,
    and the reader copies each out of it. The time ends when all are there. Figures are medians over the rounds, and
    the share is one within a round: an entry is copied twice, so half a copy's bandwidth is all that there is.

    Args:
        rank: of the calling process, of two.
        folder: by which they find each other.
        device: on which both compute.
        sizes: bytes of an entry -> how many pass in a round.
        rounds: that count; one more goes before.
    """
    mesh = Mesh.connect(FileStore(str(folder / "mesh"), 2), rank, 2, ["owner", "reader"])
    room = _IN_FLIGHT * entry_nbytes([max(sizes)]) if rank == _OWNER else MIB
    tier = choose_device_tier("auto", mesh, device, room)
    pool = Pool.open(mesh, room, 0, device=tier, runtime=runtime_of(device) if tier is None else tier.runtime)
    figures = []
    try:
        for nbytes, count in sizes.items():
            numbers = range(nbytes, nbytes + rounds + 1)
            if rank == _OWNER:
                figures.append(_put_rounds(pool, device, nbytes, count, numbers))
            else:
                _get_rounds(pool, device, nbytes, count, numbers)
    finally:
        pool.close()
        if tier is not None:
            tier.close()
        mesh.close()
    return figures


def _put_rounds(pool: Pool, device: torch.device, nbytes: int, count: int, numbers: range) -> dict[str, float]:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied, passed, calls, through_host = [], [], [], 0
    for number in numbers:
        source.fill_(number % 251)
        _finish(device)
        start = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        _finish(device)
        copied.append(time.perf_counter() - start)
        start = time.perf_counter()
        for item in range(count):
            seconds, address = _put(pool, Key(_ENTRY, number, item), source)
            calls.append(seconds)
            through_host += address.tier is not Tier.DEVICE
        _get(pool, Key(_ANSWER, number, 0)).release()
        passed.append(time.perf_counter() - start)
    shares = [2 * copy / put for copy, put in zip(copied[1:], passed[1:], strict=True)]
    return {
        "bytes": nbytes,
        "copy_gigabytes": nbytes * count / median(copied[1:]) / 1e9,
        "passed_gigabytes": nbytes * count / median(passed[1:]) / 1e9,
        "share": median(shares),
        "host_us": 1e6 * median(calls[count:]),
        "through_host": through_host,
    }


def _get_rounds(pool: Pool, device: torch.device, nbytes: int, count: int, numbers: range) -> None:
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for number in numbers:
        for item in range(count):
            lease = _get(pool, Key(_ENTRY, number, item))
            target.copy_(lease.tensors[0], non_blocking=True)
            lease.release()
        pool.settle()
        _finish(device)
        _put(pool, Key(_ANSWER, number, 0), torch.ones(1), reader=_OWNER)
        if not bool((target == number % 251).all()):
            raise RuntimeError(f"The last of {count} entries of {nbytes} bytes came with other bytes than were put.")


def _put(pool: Pool, key: Key, tensor: Tensor, reader: int = _READER) -> tuple[float, Address]:
    """Seconds of the call that found room, and what it returned."""
    while True:
        start = time.perf_counter()
        address = pool.put(key, [tensor], [reader])
        seconds = time.perf_counter() - start
        pool.poll(0.0 if address is not None else _WAIT_SECONDS)
        if address is not None:
            return seconds, address


def _get(pool: Pool, key: Key) -> Lease:
    while (lease := pool.get(key)) is None:
        pool.poll(_WAIT_SECONDS)
    return lease


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
