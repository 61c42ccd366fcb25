"""A thread that carries entries to and from ranks of other hosts, so that no lane waits for the network.

An entry goes as a record of 64 bytes, which says what it is, and its bytes as they lie in the owner's segment. They are
received where they will be read: nothing is copied between. Only what an owner keeps in its segment can be on its way,
so a reader needs no more memory for entries of an owner than that owner's segment has.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.between_hosts.page_exchange import unacknowledged
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.record import RECORD_BYTES, Kind, Record, decode_record, encode_record

_AT_ONCE_BYTES = 1 << 20  # sent or received by one call, so that every peer has its turn


class _Shipment:
    """A record, and the bytes of an entry that follow it; ``start`` of both together are sent."""

    def __init__(self, address: int, record: bytes, entry: memoryview) -> None:
        self.address = address
        self.record = record
        self.entry = entry
        self.start = 0

    def send(self, connection: socket.socket) -> bool:
        """Send as much as the connection takes, up to a limit; True when all is sent."""
        entry_start = max(self.start - RECORD_BYTES, 0)
        piece = self.entry[entry_start : entry_start + _AT_ONCE_BYTES]
        self.start += connection.sendmsg([self.record[self.start :], piece])
        return self.start == RECORD_BYTES + len(self.entry)


class _Arrival:
    """What is arriving from one rank: a record, then the entry that it tells of."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._segments: dict[int, int] = {}  # link -> bytes of the peer's segment
        self._head = bytearray(RECORD_BYTES)
        self._record: Record | None = None
        self._buffer = self._head
        self._filled = 0

    def receive(self, connection: socket.socket) -> Record | None:
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

    def _begin(self, record: Record) -> None:
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
                "another host. Lower `pool_bytes` or run fewer ranks on this machine."
            ) from None


class _Way:
    """Both directions of the connection to one rank of another host."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.connection = connection
        self.shipments: deque[_Shipment] = deque()
        self.arrival = _Arrival(peer)


class Carrier:
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
        arrived: deque[Record],
        wake: Callable[[], None],
        fail: Callable[[str, int | None], None],
    ) -> None:
        self._arrived = arrived
        self._wake = wake
        self._fail = fail
        self._ways = {peer: _Way(peer, connection) for peer, connection in connections.items()}
        self._way_of = {way.connection.fileno(): way for way in self._ways.values()}
        self._lock = threading.Lock()  # of all shipments
        self._waiting: set[int] = set()  # descriptors of ways on which something is to be sent
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        for descriptor in self._way_of:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowtrain-carrier", daemon=True)
        self._thread.start()

    def send(self, peer: int, record: Record, entry: memoryview) -> None:
        """Send a record and an entry, in the order of these calls. Never waits.

        Args:
            peer: a rank of another host.
            record: tells of the entry.
            entry: its bytes, which must not change before the reader has released it.
        """
        with self._lock:
            self._ways[peer].shipments.append(_Shipment(record.address, encode_record(record), entry))
        os.eventfd_write(self._bell, 1)

    @property
    def busy(self) -> bool:
        """Whether something is still to be sent, or to be confirmed by the other host."""
        ways = list(self._way_of.values())
        return any(way.shipments or unacknowledged(way.connection) for way in ways)

    def close(self) -> None:
        """End the thread and close the connections; what is not sent is lost."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for way in self._ways.values():
            way.connection.close()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        while not self._closing:
            for descriptor, event in self._epoll.poll():
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                    self._watch_all()
                    continue
                way = self._way_of[descriptor]
                if event & select.EPOLLOUT:
                    self._send_piece(way)
                if event & ~select.EPOLLOUT:
                    self._receive_piece(way)

    def _send_piece(self, way: _Way) -> None:
        with self._lock:
            try:
                if way.shipments and way.shipments[0].send(way.connection):
                    way.shipments.popleft()
            except BlockingIOError:
                pass
            except OSError:
                way.shipments.clear()  # that the peer is lost is noticed where its pages come
        self._watch(way)

    def _receive_piece(self, way: _Way) -> None:
        try:
            record = way.arrival.receive(way.connection)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._forget(way)  # that the peer is lost is noticed where its pages come
            return
        except PoolError as error:
            self._fail(str(error), way.arrival.peer)
            self._forget(way)
            return
        if record is not None:
            self._arrived.append(record)
            self._wake()

    def _watch_all(self) -> None:
        for way in list(self._way_of.values()):
            self._watch(way)

    def _watch(self, way: _Way) -> None:
        """Be told when the peer takes more, as long as there is more."""
        descriptor = way.connection.fileno()
        if bool(way.shipments) != (descriptor in self._waiting):
            self._waiting ^= {descriptor}
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if way.shipments else 0))

    def _forget(self, way: _Way) -> None:
        descriptor = way.connection.fileno()
        self._epoll.unregister(descriptor)
        self._waiting.discard(descriptor)
        del self._way_of[descriptor]
