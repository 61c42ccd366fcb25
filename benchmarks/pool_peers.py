"""The ways by which a tensor gets from one process to others, the pool's and its peers', behind one interface."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from flowtrain_lightning.pool import Key, Lease, Mesh, Pool, entry_nbytes

STORE_BYTES = 4 << 20
"""What a TCPStore takes at most; it fails a little above."""


class Way(Protocol):
    """Moves a tensor from rank 0 to ranks 1 .. ``readers``. Built by every rank at the same time."""

    most_bytes: int
    """Larger tensors are not sent this way."""

    def send(self, turn: int, tensor: Tensor, readers: int) -> None:
        """Called by rank 0; turns are never used twice."""

    def receive(self, turn: int, nbytes: int) -> Tensor:
        """Called by a reader, which sleeps until the tensor is there."""

    def finish(self, turn: int) -> None:
        """Called by all when the tensor is not used any more."""

    def close(self) -> None:
        """Called by all at the end."""


class PoolWay:
    """Shared memory, read in place."""

    def __init__(self, mesh: Mesh, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._pool = Pool.open(mesh, entry_nbytes([most_bytes]) if mesh.rank == 0 else 0, 0)
        self._rank = mesh.rank
        self._lease: Lease | None = None

    def send(self, turn: int, tensor: Tensor, readers: int) -> None:
        address = self._pool.put(Key(0, turn, 0), [tensor], range(1, readers + 1))
        assert address is not None, "the pool is too small for as many at once"

    def receive(self, turn: int, nbytes: int) -> Tensor:
        while (lease := self._pool.get(Key(0, turn, 0))) is None:
            self._pool.poll(1.0)
        self._lease = lease
        return lease.tensors[0]

    def finish(self, turn: int) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        while self._rank == 0 and not self._pool.fits(self.most_bytes):
            self._pool.poll(1.0)

    def close(self) -> None:
        self._pool.close()


class GlooWay:
    """``torch.distributed`` point to point."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._into = torch.zeros(most_bytes, dtype=torch.uint8)

    def send(self, turn: int, tensor: Tensor, readers: int) -> None:
        for reader in range(1, readers + 1):
            dist.send(tensor, reader)

    def receive(self, turn: int, nbytes: int) -> Tensor:
        dist.recv(self._into[:nbytes], 0)
        return self._into[:nbytes]

    def finish(self, turn: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        dist.destroy_process_group()


class QueueWay:
    """``torch.multiprocessing.Queue``. A tensor that was sent is shared from then on, so each time a new one goes."""

    def __init__(self, rank: int, queues: Iterable[Any], most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rank = rank
        self._queues = list(queues)

    def send(self, turn: int, tensor: Tensor, readers: int) -> None:
        shared = tensor.clone()
        for queue in self._queues[:readers]:
            queue.put(shared)

    def receive(self, turn: int, nbytes: int) -> Tensor:
        tensor: Tensor = self._queues[self._rank - 1].get()
        return tensor

    def finish(self, turn: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """The queues end with their processes."""


class ZeroMQWay:
    """pyzmq over a unix socket."""

    def __init__(self, rank: int, ranks: int, folder: Path, most_bytes: int) -> None:
        import zmq

        self.most_bytes = most_bytes
        self._context = zmq.Context()
        self._sockets = {}
        for reader in range(1, ranks) if rank == 0 else [rank]:
            made = self._context.socket(zmq.PAIR)
            address = f"ipc://{folder}/zmq{reader}"
            if rank == 0:
                made.bind(address)
            else:
                made.connect(address)
            self._sockets[reader] = made
        self._rank = rank

    def send(self, turn: int, tensor: Tensor, readers: int) -> None:
        for reader in range(1, readers + 1):
            self._sockets[reader].send(tensor.numpy().data)

    def receive(self, turn: int, nbytes: int) -> Tensor:
        frame = self._sockets[self._rank].recv(copy=False)
        return torch.frombuffer(frame.buffer, dtype=torch.uint8)

    def finish(self, turn: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        self._context.destroy(linger=0)


class StoreWay:
    """``torch.distributed.TCPStore``: rank 0 sets a key, readers get it."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        self.most_bytes = STORE_BYTES
        self._rank = rank
        self._store = TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))

    def send(self, turn: int, tensor: Tensor, readers: int) -> None:
        self._store.set(str(turn), tensor.numpy().tobytes())  # type: ignore[arg-type]  # takes bytes as well

    def receive(self, turn: int, nbytes: int) -> Tensor:
        return torch.frombuffer(bytearray(self._store.get(str(turn))), dtype=torch.uint8)

    def finish(self, turn: int) -> None:
        if self._rank == 0:
            self._store.delete_key(str(turn))

    def close(self) -> None:
        """The store ends with its process."""


def open_ways(rank: int, ranks: int, folder: Path, port: int, queues: Iterable[Any], most_bytes: int) -> dict[str, Way]:
    """All ways that work on this machine, by name; every rank calls it."""
    labels = ["owner", *(f"reader {reader}" for reader in range(1, ranks))]
    mesh = Mesh.connect(FileStore(str(folder / "mesh"), ranks), rank, ranks, labels)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=ranks)
    ways: dict[str, Way] = {
        "pool": PoolWay(mesh, most_bytes),
        "gloo send/recv": GlooWay(most_bytes),
        "torch.multiprocessing.Queue": QueueWay(rank, queues, most_bytes),
        "TCPStore": StoreWay(rank, ranks, port),
    }
    with suppress(ImportError):  # on all ranks alike; `pip install pyzmq` adds it
        ways["pyzmq ipc"] = ZeroMQWay(rank, ranks, folder, most_bytes)
    return ways


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
