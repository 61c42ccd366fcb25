"""A thread that sends the own status page to the ranks of other hosts, takes in theirs, and notices when they are gone.

The end of a process closes its connections, which its kernel tells at once. When a whole host vanishes or the network
is cut nobody tells: then what was sent stays unacknowledged, or the kernel's keep-alive unanswered, and the connection
ends after ``UNREACHABLE_SECONDS``. A process that is stopped, or too busy to answer, is not taken for a dead one,
because its kernel answers for it.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Mapping

from flowtrain_lightning.pool.between_hosts.hosts import UNREACHABLE_SECONDS
from flowtrain_lightning.pool.between_hosts.status_copy import StatusCopy, decode_status, encode_status
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.liveness import Status, StatusPage
from flowtrain_lightning.pool.record import Kind, Record, encode_record
from flowtrain_lightning.pool.stream import Stream

_LOOK_SECONDS = 0.1  # how often the own page is looked at
_SEND_SECONDS = 0.25  # how often it is sent though nothing urgent has changed
_UNHEARD_BYTES = 48 * 1024  # what a peer that does not answer is sent at most: it fits into any receive buffer
_TELL_SECONDS = 0.3  # how long `tell` waits until the other hosts have the page
_TCP_CLOSE = 7  # the state of a connection that was reset


class _Peer:
    """One rank of another host."""

    def __init__(self, connection: socket.socket, copy: StatusCopy) -> None:
        self.socket = connection
        self.stream = Stream(connection, copy.rank)
        self.copy = copy
        self.unheard = 0  # bytes sent since its last page


class PageExchange:
    """Runs from its making until `close`.

    Args:
        page: of the calling rank.
        connections: for each rank of another host the connection that carries pages, and where to put what it says;
            closed by `close`.
        ranks: how many there are.
        fail: called with a sentence and a rank when a peer sends what is no page.
    """

    def __init__(
        self,
        page: StatusPage,
        connections: Mapping[int, tuple[socket.socket, StatusCopy]],
        ranks: int,
        fail: Callable[[str, int | None], None],
    ) -> None:
        self._page = page
        self._ranks = ranks
        self._fail = fail
        self._peers = {connection.fileno(): _Peer(connection, copy) for connection, copy in connections.values()}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        for descriptor, peer in self._peers.items():
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREACHABLE_SECONDS * 1000))
            self._epoll.register(descriptor, select.EPOLLIN)
        self._urgent: tuple[object, ...] = ()
        self._sent = -1.0
        self._asked = self._answered = 0  # how often `tell` was called, and how many of these calls are served
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowtrain-pages", daemon=True)
        self._thread.start()

    def tell(self, seconds: float = _TELL_SECONDS) -> None:
        """Send the page now, and wait up to ``seconds`` until the other hosts have it."""
        asked = self._asked = self._asked + 1
        os.eventfd_write(self._bell, 1)
        deadline = time.monotonic() + seconds
        while self._answered < asked or any(unacknowledged(peer.socket) for peer in list(self._peers.values())):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)

    def close(self) -> None:
        """End the thread and close the connections."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for peer in self._peers.values():
            peer.stream.close()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        while not self._closing:
            self._send_page()
            for descriptor, event in self._epoll.poll(_LOOK_SECONDS):
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                elif event & select.EPOLLOUT:
                    self._peers[descriptor].stream.flush()
                    self._peers[descriptor].stream.watch(self._epoll)
                else:
                    self._hear(self._peers[descriptor])

    def _send_page(self) -> None:
        """Send the page to whoever can take it, when something urgent has changed or it was not sent for a while."""
        asked, status, now = self._asked, self._page.read(), time.monotonic()
        urgent = _urgent(status)
        if urgent == self._urgent and asked == self._answered and now - self._sent < _SEND_SECONDS:
            return
        self._urgent, self._sent = urgent, now
        record = encode_record(Record(Kind.STATUS, self._page.rank, payload=encode_status(status)))
        for peer in self._peers.values():
            if not peer.stream.queued and peer.unheard < _UNHEARD_BYTES:
                peer.unheard += len(record)
                peer.stream.send(record)
                peer.stream.watch(self._epoll)
        self._answered = asked

    def _hear(self, peer: _Peer) -> None:
        try:
            found = peer.stream.read()
            for _, record in found or ():
                if record.kind is not Kind.STATUS:
                    raise PoolError(f"Rank {peer.copy.rank} sent {record} where its status pages come.")
                peer.copy.update(decode_status(peer.copy.rank, self._ranks, record.payload))
                peer.unheard = 0
        except PoolError as error:
            self._fail(str(error), peer.copy.rank)
            found = None
        if found is None:
            peer.copy.lose(_cause(peer.stream.error))
            self._epoll.unregister(peer.stream.descriptor)
            del self._peers[peer.stream.descriptor]
            peer.stream.close()


def unacknowledged(connection: socket.socket) -> int:
    """Bytes that were sent and that the other host has not confirmed; 0 when the connection has ended."""
    try:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):
        return 0


def _urgent(status: Status) -> tuple[object, ...]:
    """What others must know at once."""
    return status.state, status.blames, status.sigterm, status.phase.startswith("wait")


def _cause(error: OSError | None) -> str:
    if error is None or isinstance(error, ConnectionError):
        return "died (its connection was closed)"
    return f"can no longer be reached (its host did not answer for {UNREACHABLE_SECONDS:g} s: {error.strerror})"
