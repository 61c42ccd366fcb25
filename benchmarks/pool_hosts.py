"""How fast entries pass between hosts, beside what carries them: all in turn, over this machine's own network.

``python benchmarks/pool_hosts.py`` prints a table. Times are from put to release; processor time is that of both
processes. The pool's entries go over ZeroMQ with CURVE, which encrypts and signs every byte: what a pair of its sockets
takes for the same bytes, which nobody keeps books of, is the bound of what the pool can reach.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

os.environ["OMP_NUM_THREADS"] = "1"  # of every process

import numpy as np
import torch
import zmq
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).parents[1]))

from flowtrain_lightning.pool import Key, Mesh, Pool, entry_nbytes
from flowtrain_lightning.pool.between_hosts.curve import curve_key
from flowtrain_lightning.pool.between_hosts.peer_messages import PIECE_BYTES

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
SECRET = "of the benchmark, and known to both of its processes"
NOT_COUNTED = 2
"""Samples in which connections and memory are new."""


class Way(Protocol):
    """One way from one process to the other."""

    def send(self, sample: int, tensor: Tensor) -> None:
        """Send the tensor, and wait until the other end has done with it."""

    def receive(self, sample: int, nbytes: int) -> None:
        """Take what was sent, look whether it is whole, and give it back."""


class PoolWay:
    """The pool, as if each rank had a host of its own."""

    def __init__(self, rank: int, folder: Path) -> None:
        store, labels = FileStore(str(folder / "pool"), 2), ["owner", "reader"]
        self._mesh = Mesh.connect(store, rank, 2, labels, 60.0, "127.0.0.1", f"host {rank}", SECRET)
        self._pool = Pool.open(self._mesh, entry_nbytes([max(SIZES)]) if rank == 0 else 0, 0)

    def send(self, sample: int, tensor: Tensor) -> None:
        self._pool.put(Key(0, tensor.nbytes, sample), [tensor], [1])
        while self._pool.counters.current.now:
            self._pool.poll(1.0)

    def receive(self, sample: int, nbytes: int) -> None:
        while (lease := self._pool.get(Key(0, nbytes, sample))) is None:
            self._pool.poll(1.0)
        check(lease.tensors[0], sample)
        lease.release()


class ZeroMQWay:
    """Two sockets of ZeroMQ and nothing else, with CURVE or without."""

    def __init__(self, rank: int, folder: Path, curve: bool) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.PAIR)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        address = folder / f"port-{curve}"
        if curve:
            own, other = (curve_key(SECRET, each, 2) for each in (rank, 1 - rank))
            self._socket.curve_publickey, self._socket.curve_secretkey = own
            if rank == 0:
                self._socket.curve_server = True
            else:
                self._socket.curve_serverkey = other.public
        if rank == 0:
            tell(address, self._socket.bind_to_random_port("tcp://127.0.0.1"))
        else:
            self._socket.connect(f"tcp://127.0.0.1:{hear(address)}")

    def send(self, sample: int, tensor: Tensor) -> None:
        whole = tensor.numpy().data
        for begin in range(0, len(whole), PIECE_BYTES):
            self._socket.send(whole[begin : begin + PIECE_BYTES], copy=False)
        self._socket.recv()

    def receive(self, sample: int, nbytes: int) -> None:
        whole, filled = bytearray(nbytes), 0
        while filled < nbytes:
            piece = self._socket.recv(copy=False).buffer
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)
        check(torch.frombuffer(whole, dtype=torch.uint8), sample)
        self._socket.send(b"")


class TCPWay:
    """A TCP connection."""

    def __init__(self, rank: int, folder: Path) -> None:
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                tell(folder / "port", server.getsockname()[1])
                self._socket, _ = server.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", hear(folder / "port")))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, sample: int, tensor: Tensor) -> None:
        self._socket.sendall(tensor.numpy().data)
        self._socket.recv(1)

    def receive(self, sample: int, nbytes: int) -> None:
        whole = bytearray(nbytes)
        self._socket.recv_into(whole, nbytes, socket.MSG_WAITALL)
        check(torch.frombuffer(whole, dtype=torch.uint8), sample)
        self._socket.send(b"\0")


def open_ways(rank: int, folder: Path) -> dict[str, Way]:
    """All ways, by name; both processes call it."""
    torch.set_num_threads(1)
    return {
        "pool": PoolWay(rank, folder),
        "ZeroMQ with CURVE": ZeroMQWay(rank, folder, curve=True),
        "ZeroMQ without": ZeroMQWay(rank, folder, curve=False),
        "TCP": TCPWay(rank, folder),
    }


def check(tensor: Tensor, sample: int) -> None:
    """Refuse what is not the tensor of this sample."""
    assert tensor[0] == tensor[-1] == sample, "other bytes have come than were sent"


def tell(path: Path, port: int) -> None:
    """Leave the number of a port for the other process."""
    path.with_suffix(".new").write_text(str(port))
    path.with_suffix(".new").replace(path)


def hear(path: Path) -> int:
    """The number that the other process leaves."""
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def read(folder: Path, samples: int, pipe: Any) -> None:
    """What the other process does; after each sample it tells its processor time."""
    ways = open_ways(1, folder)
    for nbytes in SIZES:
        for sample in range(samples + NOT_COUNTED):
            for way in ways.values():
                cpu = time.process_time()
                way.receive(sample, nbytes)
                pipe.send(time.process_time() - cpu)
    pipe.recv()
    os._exit(0)


def measure(ways: dict[str, Way], samples: int, pipe: Any) -> dict[int, np.ndarray]:
    """Size -> ``[samples, ways, 2]`` seconds of time and of processor time."""
    found = {}
    for nbytes in SIZES:
        seconds = np.zeros((samples + NOT_COUNTED, len(ways), 2))
        for sample in range(samples + NOT_COUNTED):
            tensor = torch.full((nbytes,), sample, dtype=torch.uint8)
            for number, way in enumerate(ways.values()):
                start, cpu = time.perf_counter(), time.process_time()
                way.send(sample, tensor)
                seconds[sample, number] = time.perf_counter() - start, time.process_time() - cpu
                seconds[sample, number, 1] += pipe.recv()
        found[nbytes] = seconds[NOT_COUNTED:]
    return found


def table(names: Sequence[str], found: dict[int, np.ndarray]) -> str:
    """Medians; the ratio is that of neighbours."""
    lines = ["|      bytes |               way |      time |  MB/s | processors | time / that of CURVE |"]
    lines.append("|-----------:|------------------:|----------:|------:|-----------:|---------------------:|")
    for nbytes, seconds in found.items():
        for number, name in enumerate(names):
            time_taken, cpu = np.median(seconds[:, number], axis=0)
            ratio = np.median(seconds[:, number, 0] / seconds[:, names.index("ZeroMQ with CURVE"), 0])
            lines.append(
                f"| {nbytes:10,} | {name:>17} | {time_taken * 1e3:6.2f} ms | {nbytes / time_taken / 1e6:5.0f} | "
                f"{cpu * 1e3:7.2f} ms | {ratio:20.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=15, help="of each size, up to 250")
    samples = parser.parse_args().samples
    context, (near, far) = multiprocessing.get_context("fork"), multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        reader = context.Process(target=read, args=(Path(folder), samples, far), daemon=True)
        reader.start()
        ways = open_ways(0, Path(folder))
        print(table(list(ways), measure(ways, samples, near)))
        near.send(None)
        reader.join(10)
    sys.stdout.flush()
    os._exit(0)  # the pool is not left in good order: the other process has ended


if __name__ == "__main__":
    main()
