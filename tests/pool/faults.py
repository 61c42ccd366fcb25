"""Jobs whose ranks exchange entries until one of them is hit, and what must be true of such a job afterwards."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from flowtrain_lightning.pool import Address, Key, PoolError, Tier
from tests.pool.ranks import device_of, join_job, labels, open_pool
from tests.processes import RankResult, Ranks

TOLD = 7
"""Exit code of a rank that was told by the pool that another one is gone."""

_MEMORY = re.compile(r" (\d+) +/memfd:flowtrain ")
_SOCKET = re.compile(rb"flowtrain-[0-9a-f]{32}")


def exchange(
    rank: int, ranks: int, rounds: int, seed: int, timeout: float = 60.0, transport: str = "shared_memory"
) -> None:
    """Every rank puts entries for all others, reads theirs and checks each.

    Without end when ``rounds`` is 0, else as soon as the test says "go".
    """
    choose = random.Random(seed * ranks + rank)
    folder, inherited = Path(os.environ["FOLDER"]), _own_memory()
    try:
        mesh = join_job(rank, ranks, timeout)
        pool = open_pool(mesh, 1 << 17, 0, transport, late=True)
        (folder / f"memory{rank}").write_text(" ".join(_own_memory() - inherited))
        (folder / f"ready{rank}").touch()
        while rounds and not (folder / "go").exists():
            pool.poll(0.01)
        peers = [peer for peer in range(ranks) if peer != rank]
        turn = 0
        while turn < rounds or not rounds:
            mesh.page.enter("exchange", turn)
            tensor = torch.full((choose.randint(1, 3000),), float(1000 * rank + turn % 1000))
            while pool.put(Key(rank, turn, 0), [tensor], peers) is None:
                pool.poll(1.0)
            for peer in peers:
                while (lease := pool.get(Key(peer, turn, 0))) is None:
                    pool.poll(1.0)
                look = _look_for(1000 * peer + turn % 1000, lease.tensors[0])
                if Address(lease.address).tier is Tier.DEVICE:
                    device_of(mesh).current().put(look)  # the host never waits for a device whose peers may be gone
                else:
                    look()
                lease.release()
            turn += 1
        while pool.counters.current.now:
            pool.poll(1.0)
        if transport == "device":
            device_of(mesh).synchronize()
    except PoolError as error:
        print(time.monotonic(), error, flush=True)
        os._exit(TOLD)
    pool.close()
    mesh.close()


def _look_for(value: int, tensor: Tensor) -> Callable[[], None]:
    def look() -> None:
        assert tensor.eq(value).all(), "another entry's bytes"

    return look


def exchange_until_killed(
    rank: int, ranks: int, victim: int, calls: int, timeout: float, transport: str = "shared_memory"
) -> None:
    """As `exchange` without end, but the victim is killed when it has called, or returned from, so many functions."""
    if rank == victim:
        left = calls

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
    exchange(rank, ranks, 0, calls, timeout, transport)


def slowness() -> float:
    """How many times as long as on a calm machine things may take on this one now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def told(results: list[RankResult], victims: Collection[int], within: float, since: float) -> list[str]:
    """What the survivors were told, who all ended in time and with the pool's error.

    Args:
        results: of all ranks.
        victims: were killed.
        within: seconds, on a calm machine.
        since: ``time.monotonic()`` at the kill.
    """
    sentences = []
    for result in results:
        if result.rank in victims:
            assert result.code == -signal.SIGKILL, str(result)
            continue
        assert result.code == TOLD, str(result)
        moment, _, sentence = result.out.partition(" ")
        assert float(moment) - since < within * slowness(), str(result)
        sentences.append(sentence)
    return sentences


def named(rank: int, ranks: int) -> str:
    """How messages name a rank of these jobs."""
    return f"Rank {rank} ({labels(ranks)[rank]})"


def assert_nothing_is_left(job: Ranks, ranks: int) -> None:
    """No process of a job that has ended, none of its sockets or shared memory, and no file but those of the test."""
    for rank in range(ranks):
        with pytest.raises(ProcessLookupError):
            os.killpg(job.group(rank), 0)
    store = job.folder / "store"
    sockets = _SOCKET.findall(store.read_bytes()) if store.exists() else []
    open_sockets = Path("/proc/net/unix").read_bytes()
    assert not [name for name in sockets if name in open_sockets]
    memory = {inode for file in job.folder.glob("memory*") for inode in file.read_text().split()}
    assert not memory & _mapped_memory()
    expected = re.compile(r"store|go|(memory|ready)\d|rank\d\.(out|err)")
    assert not [file.name for file in job.folder.iterdir() if not expected.fullmatch(file.name)]


def _own_memory() -> set[str]:
    """The inodes of all pools' memory that this process has mapped, that of former tests in its parent among them."""
    return set(_MEMORY.findall(Path("/proc/self/maps").read_text()))


def _mapped_memory() -> set[str]:
    """The inodes of all pools' memory that any process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.update(_MEMORY.findall(maps.read_text()))
        except OSError:  # it has just ended
            continue
    return found
