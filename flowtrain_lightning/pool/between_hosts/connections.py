"""The connections of a rank to those of other hosts: three to each, all through one socket of ZeroMQ."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import zmq

from flowtrain_lightning.pool.between_hosts.peer_messages import Purpose
from flowtrain_lightning.ports import shut


class Listener:
    """A port at which other ranks connect.

    Args:
        address: IPv4 address of this host.

    Attributes:
        port: which was free.

    Raises:
        OSError: when it is no address of this host.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=socket.SOMAXCONN)  # also for strangers
        _, self.port = self._socket.getsockname()
        self._address = address
        self._bound = -1

    def bind(self, router: zmq.Socket[bytes]) -> None:
        """Let those who connect here talk to ``router``, with the options that it has now."""
        self._bound = os.dup(self._socket.fileno())  # closed by ZeroMQ
        router.setsockopt(zmq.USE_FD, self._bound)
        router.bind(f"tcp://{self._address}:{self.port}")
        router.setsockopt(zmq.USE_FD, -1)

    @property
    def descriptors(self) -> list[int]:
        """All that hold the port open."""
        return [descriptor for descriptor in (self._socket.fileno(), self._bound) if descriptor >= 0]

    def shut(self) -> None:
        """Let nobody in any more; those stay who have come."""
        shut(self._socket)

    def close(self) -> None:
        """Let go of the port."""
        self._socket.close()


class ConnectionEvent(NamedTuple):
    """The begin or the end of a connection.

    Attributes:
        kind: ``zmq.EVENT_ACCEPTED``, ``_CONNECTED``, ``_DISCONNECTED`` or ``_CLOSED`` (it could not be made).
        descriptor: of the connection; once it has ended the next one may get the number.
        endpoint: where this rank connected, or its own where somebody else did.
    """

    kind: int
    descriptor: int
    endpoint: str


class ConnectionEvents:
    """Connections of a socket that begin and end, in the order in which they do. Build it with `of`.

    Args:
        socket: on which ZeroMQ tells of them.

    Attributes:
        socket: has something to read when something has happened.
        open: descriptors of the connections that are open, as far as events were taken.
    """

    _KINDS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
    _EVENT = struct.Struct("=Hi")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.open: set[int] = set()

    @classmethod
    def of(cls, router: zmq.Socket[bytes]) -> ConnectionEvents:
        """Those of a socket whose context has one I/O thread, as it has by itself: several would mix up the order."""
        name = f"inproc://flowtrain-{secrets.token_hex(16)}"
        router.monitor(name, cls._KINDS)
        socket: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        # Else ZeroMQ's thread would wait where a crowd of strangers comes and nobody reads, and so would closing.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(name)
        return cls(socket)

    def take(self) -> Iterator[ConnectionEvent]:
        """Events since the last call, whole or in part."""
        while True:
            try:
                numbers, endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, descriptor = self._EVENT.unpack(numbers)
            event = ConnectionEvent(kind, descriptor, endpoint.decode())
            if event.kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                self.open.add(event.descriptor)
            elif event.kind == zmq.EVENT_DISCONNECTED:
                self.open.discard(event.descriptor)
            yield event


@dataclass(eq=False)
class RemoteConnections:
    """All connections to ranks of other hosts. Used by one thread at a time.

    Attributes:
        rank: the calling rank.
        router: through which all messages pass, each behind the `identity` of its connection.
        events: tell of connections that end.
        listeners: at which they came.
        ends: descriptor -> peer, of each connection that was open when the last event was taken.
        early: what came from peers that were ready before this rank.
    """

    rank: int
    router: zmq.Socket[bytes]
    events: ConnectionEvents
    listeners: tuple[Listener, ...]
    ends: dict[int, int]
    early: list[list[zmq.Frame]]

    def __post_init__(self) -> None:
        _open.add(self)

    @property
    def peers(self) -> list[int]:
        """Ranks of other hosts."""
        return sorted(set(self.ends.values()))

    def close(self) -> None:
        """Close all; what is not sent is lost."""
        _open.discard(self)
        close_sockets(self.router, self.events, self.listeners)


def identity(rank: int, purpose: Purpose) -> bytes:
    """The name of a connection at the end that is not ``rank``'s."""
    return f"{rank}/{purpose.value}".encode()


def close_sockets(router: zmq.Socket[bytes], events: ConnectionEvents, listeners: Iterable[Listener]) -> None:
    """Close these, and the context that is theirs alone."""
    router.disable_monitor()
    events.socket.close(linger=0)
    router.close(linger=0)
    router.context.term()
    for listener in listeners:
        listener.close()


_open: WeakSet[RemoteConnections] = WeakSet()


def _close_in_child() -> None:
    """A fork that outlived this process would hold its connections open, and others could not see that it died."""
    for connections in list(_open):
        for descriptor in (*connections.ends, *(each for one in connections.listeners for each in one.descriptors)):
            with suppress(OSError):  # it has ended
                os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
