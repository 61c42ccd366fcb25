"""Ranks of several hosts meet while strangers come to their ports, say something or nothing, and go or stay."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from torch.distributed import FileStore, PrefixStore, Store

from flowtrain_lightning.pool import Mesh
from flowtrain_lightning.pool.between_hosts.curve import curve_key
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from tests.pool.ranks import SECRET, labels, receive_all
from tests.processes import Ranks, assert_all_good

Address = tuple[str, int]

_MOST_OPEN = 400  # connections that a crowd keeps open
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing says so with a reset


def greeting(mechanism: bytes) -> bytes:
    """The first bytes of a connection of ZeroMQ (ZMTP 3.1)."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


_CURVE_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)


def _words(choose: random.Random) -> bytes:
    """What a stranger says: nothing, half of a greeting, a whole one of any mechanism, or one with garbage behind."""
    whole = greeting(choose.choice([b"CURVE", b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20]))
    return choose.choice(
        [
            b"",
            whole,
            whole[: choose.randrange(1, len(whole))],
            whole + choose.randbytes(choose.randrange(1, 300)),
            whole + _CURVE_HELLO + choose.randbytes(126),
            b"GET / HTTP/1.1\r\n\r\n",
            choose.randbytes(choose.randrange(1, 500)),
        ]
    )


class Crowd:
    """Connects, says something and goes, or stays, again and again.

    Args:
        choose: what each one does.
    """

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._open: deque[socket.socket] = deque()

    def fire(self, addresses: Sequence[Address]) -> None:
        """One to twenty strangers come to these addresses at once."""
        choose = self._choose
        burst = [self._connect(choose.choice(addresses)) for _ in range(choose.choice([1, 1, 5, 20]))]
        for connection in filter(None, burst):
            with suppress(OSError):
                connection.sendall(_words(choose))
            self._leave(connection)

    def _connect(self, address: Address) -> socket.socket | None:
        with suppress(OSError):  # the port lets nobody in any more
            return socket.create_connection(address, 0.2)
        return None

    def _leave(self, connection: socket.socket) -> None:
        choose = self._choose
        if choose.random() < 0.1:
            self._open.append(connection)
            if len(self._open) > _MOST_OPEN:
                self._open.popleft().close()
            return
        with suppress(OSError):
            if choose.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            elif choose.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
                self._open.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """All go."""
        while self._open:
            self._open.popleft().close()


def greet_and_go(address: Address) -> None:
    """What ended starts: a greeting in good order, and gone."""
    with suppress(OSError), socket.create_connection(address, 0.2) as connection:
        connection.sendall(greeting(b"CURVE"))


def speak_with_another_secret(addresses: Sequence[Address]) -> None:
    """Begin handshakes with the keys of another job."""
    own, server = curve_key("another secret", 1, 2), curve_key("another secret", 0, 2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.curve_publickey, dealer.curve_secretkey = own
        dealer.curve_serverkey = server.public
        for host, port in addresses:
            dealer.connect(f"tcp://{host}:{port}")
            dealer.send(b"hello")
        dealer.poll(20)


RANKS = 3  # two of them on one host
SECONDS = 30.0


def store_of(start: int) -> Store:
    return PrefixStore(f"start {start}", FileStore(str(Path(os.environ["FOLDER"], "store")), -1))


def meet(rank: int, starts: int) -> None:
    """Ranks come one after the other, while the strangers are at the ports of those that have come."""
    choose = random.Random(rank)
    for start in range(starts):
        time.sleep(choose.random() * 0.2 * rank)
        where = {"address": "127.0.0.1", "location": f"host {rank % 2}", "secret": SECRET}
        mesh = Mesh.connect(store_of(start), rank, RANKS, labels(RANKS), SECONDS, **where)
        for peer in mesh.peers:
            mesh.send(peer, ControlRecord(Kind.RELEASE, rank, number=start))
        assert [record.number for record in receive_all(mesh, RANKS - 1)] == [start] * (RANKS - 1)
        mesh.close()
        Path(os.environ["FOLDER"], f"met {start} {rank}").touch()


def addresses(store: Store) -> list[Address]:
    """At which ranks listen so far."""
    hosts = (store.get(key).decode().split("\n") for rank in range(RANKS) if store.check([key := f"mesh/host/{rank}"]))
    return [(host, int(port)) for _, host, *ports in hosts for port in ports]


def fire(starts: int, seed: int) -> None:
    """Come to all ports of each start until all ranks have met."""
    folder, choose = Path(os.environ["FOLDER"]), random.Random(seed)
    crowd = Crowd(choose)
    for start in range(starts):
        store = store_of(start)
        while not all((folder / f"met {start} {rank}").exists() for rank in range(RANKS)):
            if (folder / "failed").exists():
                return
            known = addresses(store)
            if not known:
                time.sleep(0.005)
                continue
            for _ in range(20):
                if seed % 2:
                    greet_and_go(choose.choice(known))
                else:
                    crowd.fire(known)
            if seed % 2:
                speak_with_another_secret(known)
        crowd.close()


def meet_or_fire(rank: int, processes: int, starts: int) -> None:
    if rank < RANKS:
        try:
            meet(rank, starts)
        except BaseException:
            Path(os.environ["FOLDER"], "failed").touch()
            raise
    else:
        fire(starts, rank)


@pytest.mark.parametrize("starts", [3, pytest.param(100, marks=pytest.mark.full)])
def test_every_start_ends_well_whoever_comes_to_the_ports(starts):
    with Ranks(meet_or_fire, RANKS + 2, [starts]) as started:
        assert_all_good(started.wait(600))
