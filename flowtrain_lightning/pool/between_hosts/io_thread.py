"""An I/O thread that sends entries to ranks of other hosts and receives theirs, so that no lane waits for the network.

An entry goes as a record of 64 bytes, which says what it is, and its bytes as they lie in the owner's segment. They are
received where they will be read: nothing is copied between. Only what an owner keeps in its segment can be on its
way, so a reader needs no more memory for entries of an owner than that owner's segment has.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.between_hosts.remote_status import unacknowledged
from flowtrain_lightning.pool.control_records import RECORD_BYTES, ControlRecord, Kind, decode_record, encode_record
from flowtrain_lightning.pool.pool_errors import PoolError

_AT_ONCE_BYTES = 1 << 20  # sent or received by one call, so that every peer has its turn


class _SendRequest:
    """A record, and the bytes of an entry that follow it; ``start`` of both together are sent."""

    def __init__(self, record: bytes, entry: memoryview) -> None:
        self.record = record
        self.entry = entry
        self.start = 0

    def send(self, connection: socket.socket) -> bool:
        """Send as much as the connection takes, up to a limit; True when all is sent."""
        entry_start = max(self.start - RECORD_BYTES, 0)
        piece = self.entry[entry_start : entry_start + _AT_ONCE_BYTES]
        self.start += connection.sendmsg([self.record[self.start :], piece])
        return self.start == RECORD_BYTES + len(self.entry)


class _Receiver:
    """What is arriving from one rank: a record, then the entry that it tells of."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._segments: dict[int, int] = {}  # link -> bytes of the peer's segment
        self._head = bytearray(RECORD_BYTES)
        self._record: ControlRecord | None = None
        self._buffer = self._head
        self._filled = 0

    def receive(self, connection: socket.socket) -> ControlRecord | None:
        """Receive a piece.

        Returns:
            The record that is whole by it, with the entry as its payload; None where more is to come.

        Raises:
            EOFError: when the peer has closed the connection.
            PoolError: when it sent what it cannot have put.
        """
        with memoryview(self._buffer) as view:
            arrived = connection.recv_into(view[self._filled : self._filled + _AT_ONCE_BYTES])
        if not arrived:
            raise EOFError
        self._filled += arrived
        if self._filled < len(self._buffer):
            return None
        if self._record is None:
            record = decode_record(bytes(self._head), self.peer)
            self._begin(record)
            if record.kind is not Kind.SEGMENT:
                return None
        else:
            record = self._record._replace(payload=self._buffer)
        self._record, self._buffer, self._filled = None, self._head, 0
        return record

    def _begin(self, record: ControlRecord) -> None:
        if record.kind is Kind.SEGMENT and record.link not in self._segments:
            self._segments[record.link] = record.size
            return
        address = Address(record.address)
        end = address.offset + record.size
        if record.kind is not Kind.PUBLISH or not 0 < record.size <= end <= self._segments.get(record.link, 0):
            raise PoolError(f"Rank {self.peer} sent {record}, which lies outside of its segment or is no entry.")
        self._record, self._filled = record, 0
        try:
            self._buffer = bytearray(record.size)
        except MemoryError:
            raise PoolError(
                f"There is no memory for an entry of {record.size:,} bytes from rank {self.peer}, which runs on "
                "another host. Lower `PoolSettings(bytes=...)` or run fewer ranks on this machine."
            ) from None


class _Connection:
    """Both directions of the connection to one rank of another host."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.socket = connection
        self.requests: deque[_SendRequest] = deque()
        self.receiver = _Receiver(peer)


class IoThread:
    """Runs from its making until `close`; the other methods may be called by any one thread.

    Args:
        connections: for each rank of another host the connection that carries entries; closed by `close`.
        arrived: where records of entries that have arrived are put, with these as payload.
        wake: called when one was put there.
        fail: called with a sentence and a rank when a peer sends what it cannot have put.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        arrived: deque[ControlRecord],
        wake: Callable[[], None],
        fail: Callable[[str, int | None], None],
    ) -> None:
        self._arrived = arrived
        self._wake = wake
        self._fail = fail
        self._connections = {peer: _Connection(peer, connection) for peer, connection in connections.items()}
        self._by_descriptor = {each.socket.fileno(): each for each in self._connections.values()}
        self._waiting: set[int] = set()  # descriptors of connections on which something is to be sent
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_event, select.EPOLLIN)
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowtrain-io", daemon=True)
        self._thread.start()

    def send(self, peer: int, record: ControlRecord, entry: memoryview) -> None:
        """Send a record and an entry, in the order of these calls. Never waits.

        Args:
            peer: a rank of another host.
            record: tells of the entry.
            entry: its bytes, which must not change before the reader has released it.
        """
        self._connections[peer].requests.append(_SendRequest(encode_record(record), entry))
        os.eventfd_write(self._wake_event, 1)

    @property
    def busy(self) -> bool:
        """Whether something is still to be sent, or to be confirmed by the other host."""
        connections = list(self._by_descriptor.values())
        return any(each.requests or unacknowledged(each.socket) for each in connections)

    def close(self) -> None:
        """End the thread and close the connections; what is not sent is lost."""
        self._closing = True
        os.eventfd_write(self._wake_event, 1)
        self._thread.join()
        for each in self._connections.values():
            each.socket.close()
        self._epoll.close()
        os.close(self._wake_event)

    def _run(self) -> None:
        while not self._closing:
            for descriptor, event in self._epoll.poll():
                if descriptor == self._wake_event:
                    os.eventfd_read(self._wake_event)
                    self._watch_all()
                    continue
                connection = self._by_descriptor[descriptor]
                if event & select.EPOLLOUT:
                    self._send_piece(connection)
                if event & ~select.EPOLLOUT:
                    self._receive_piece(connection)

    def _send_piece(self, connection: _Connection) -> None:
        try:
            if connection.requests and connection.requests[0].send(connection.socket):
                connection.requests.popleft()
        except BlockingIOError:
            pass
        except OSError:
            connection.requests.clear()  # that the peer is lost is noticed where its pages come
        self._watch(connection)

    def _receive_piece(self, connection: _Connection) -> None:
        try:
            record = connection.receiver.receive(connection.socket)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._forget(connection)  # that the peer is lost is noticed where its pages come
            return
        except PoolError as error:
            self._fail(str(error), connection.receiver.peer)
            self._forget(connection)
            return
        if record is not None:
            self._arrived.append(record)
            self._wake()

    def _watch_all(self) -> None:
        for each in list(self._by_descriptor.values()):
            self._watch(each)

    def _watch(self, connection: _Connection) -> None:
        """Be told when the peer takes more, as long as there is more."""
        descriptor = connection.socket.fileno()
        if bool(connection.requests) != (descriptor in self._waiting):
            self._waiting ^= {descriptor}
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if connection.requests else 0))

    def _forget(self, connection: _Connection) -> None:
        descriptor = connection.socket.fileno()
        self._epoll.unregister(descriptor)
        self._waiting.discard(descriptor)
        del self._by_descriptor[descriptor]
