"""Status pages of other hosts: a thread sends the own page there, keeps copies of theirs, and notices their end.

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
from dataclasses import replace
from mmap import PAGESIZE, mmap

from flowtrain_lightning.pool.between_hosts.remote_rendezvous import UNREACHABLE_SECONDS
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, encode_record
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.socket_stream import SocketStream
from flowtrain_lightning.pool.status_page import State, Status, StatusPage

_LOOK_SECONDS = 0.1  # how often the own page is looked at
_SEND_SECONDS = 0.25  # how often it is sent though nothing urgent has changed
_UNHEARD_BYTES = 48 * 1024  # what a peer that does not answer is sent at most: it fits into any receive buffer
_TELL_SECONDS = 0.3  # how long `send_now` waits until the other hosts have the page
_TCP_CLOSE = 7  # the state of a connection that was reset
_SILENT_SECONDS = 5.0  # without a page: that process does not get to run, or nothing gets through
# pid, state, step, progress, heartbeat, seconds since it, seconds since the failure (negative without one), sigterm,
# rank to blame or -1, in a collective, begun steps, bytes of label, phase and error
_NUMBERS = struct.Struct("<qBqqqddBqBqIII")


def encode_status(status: Status) -> bytes:
    """The bytes that carry a status to another host, whose clock may read anything: moments become ages."""
    now = time.monotonic()
    texts = [text.encode() for text in (status.label, status.phase, status.error)]
    numbers = _NUMBERS.pack(
        status.pid,
        status.state,
        status.step,
        status.progress,
        status.heartbeat,
        now - status.heartbeat_time,
        now - status.failed_time if status.failed_time else -1.0,
        status.sigterm,
        -1 if status.blames is None else status.blames,
        status.in_collective,
        status.begun,
        *map(len, texts),
    )
    return numbers + b"".join(texts)


def decode_status(rank: int, ranks: int, message: bytes | bytearray) -> Status:
    """The status of ``rank`` that these bytes carry.

    Raises:
        PoolError: when they carry none.
    """
    if len(message) < _NUMBERS.size:
        raise PoolError(f"Rank {rank} sent a status page that is cut off.")
    pid, state, step, progress, heartbeat, age, failed, sigterm, blames, collective, begun, *lengths = (
        _NUMBERS.unpack_from(message)
    )
    if state > State.FAILED or not -1 <= blames < ranks or _NUMBERS.size + sum(lengths) != len(message):
        raise PoolError(f"Rank {rank} sent a status page that no rank writes. Do all ranks run the same version?")
    texts, start = [], _NUMBERS.size
    for length in lengths:
        texts.append(message[start : start + length].decode(errors="replace"))
        start += length
    now = time.monotonic()
    return Status(
        rank=rank,
        pid=pid,
        label=texts[0],
        state=State(state),
        phase=texts[1],
        step=step,
        progress=progress,
        heartbeat=heartbeat,
        heartbeat_time=now - age,
        sigterm=bool(sigterm),
        blames=blames if blames >= 0 else None,
        error=texts[2],
        failed_time=now - failed if failed >= 0 else 0.0,
        in_collective=bool(collective),
        begun=begun,
    )


class RemoteStatusPage(StatusPage):
    """The page of a rank of another host, as old as its last message: a fraction of a second while all is well.

    Args:
        rank: whose page it is.
        label: what that rank is, until it says so itself.

    Attributes:
        ended: an ``eventfd`` that can be read once the rank is lost, as the ``pidfd`` of a process here; who closes
            the board closes it.
    """

    def __init__(self, rank: int, label: str) -> None:
        super().__init__(rank, mmap(-1, PAGESIZE))
        self.ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heard = time.monotonic()
        self._status = Status(
            rank=rank,
            pid=0,
            label=label,
            state=State.STARTING,
            phase="",
            step=-1,
            progress=0,
            heartbeat=0,
            heartbeat_time=self._heard,
            sigterm=False,
            blames=None,
            error="",
            failed_time=0.0,
            in_collective=False,
        )

    def update(self, status: Status) -> None:
        """Take in what the rank has sent."""
        self._status = status
        self.sigterm = status.sigterm
        self._heard = time.monotonic()

    def lose(self, cause: str) -> None:
        """Nothing more will come from this rank. The first cause stays.

        Args:
            cause: a verb and what belongs to it, for example ``"died"``.
        """
        if not self._status.lost:
            self._status = replace(self._status, lost=cause)
            os.eventfd_write(self.ended, 1)

    @property
    def state(self) -> State:
        """What had become of the rank."""
        return self._status.state

    @property
    def progress(self) -> int:
        """How often the rank had entered a phase or advanced."""
        return self._status.progress

    def read(self) -> Status:
        """What the rank sent last."""
        return self._status

    def stopped(self) -> bool:
        """Whether the rank has been silent for so long that its process cannot be running."""
        return time.monotonic() - self._heard > _SILENT_SECONDS


class _Peer:
    """One rank of another host."""

    def __init__(self, connection: socket.socket, copy: RemoteStatusPage) -> None:
        self.socket = connection
        self.stream = SocketStream(connection, copy.rank)
        self.copy = copy
        self.unheard = 0  # bytes sent since its last page


class StatusExchange:
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
        connections: Mapping[int, tuple[socket.socket, RemoteStatusPage]],
        ranks: int,
        fail: Callable[[str, int | None], None],
    ) -> None:
        self._page = page
        self._ranks = ranks
        self._fail = fail
        self._peers = {connection.fileno(): _Peer(connection, copy) for connection, copy in connections.values()}
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_event, select.EPOLLIN)
        for descriptor, peer in self._peers.items():
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREACHABLE_SECONDS * 1000))
            self._epoll.register(descriptor, select.EPOLLIN)
        self._urgent: tuple[object, ...] = ()
        self._sent = -1.0
        self._asked = self._answered = 0  # how often `send_now` was called, and how many of these calls are served
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowtrain-pages", daemon=True)
        self._thread.start()

    def send_now(self, seconds: float = _TELL_SECONDS) -> None:
        """Send the page now, and wait up to ``seconds`` until the other hosts have it."""
        asked = self._asked = self._asked + 1
        os.eventfd_write(self._wake_event, 1)
        deadline = time.monotonic() + seconds
        while self._answered < asked or any(unacknowledged(peer.socket) for peer in list(self._peers.values())):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)

    def close(self) -> None:
        """End the thread and close the connections."""
        self._closing = True
        os.eventfd_write(self._wake_event, 1)
        self._thread.join()
        for peer in self._peers.values():
            peer.stream.close()
        self._epoll.close()
        os.close(self._wake_event)

    def _run(self) -> None:
        while not self._closing:
            self._send_page()
            for descriptor, event in self._epoll.poll(_LOOK_SECONDS):
                if descriptor == self._wake_event:
                    os.eventfd_read(self._wake_event)
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
        record = encode_record(ControlRecord(Kind.STATUS, self._page.rank, payload=encode_status(status)))
        for peer in self._peers.values():
            if not peer.stream.queued and peer.unheard < _UNHEARD_BYTES:
                peer.unheard += len(record)
                peer.stream.send(record)
                peer.stream.watch(self._epoll)
        self._answered = asked

    def _hear(self, peer: _Peer) -> None:
        try:
            found = peer.stream.read()
            for record in found or ():
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
