"""The thread that talks to ranks of other hosts, so that no lane waits for the network.

The end of a process closes its connections, which its kernel tells at once. When a whole host vanishes or the network
is cut nobody tells: then a status page that was sent stays unacknowledged by the other kernel, or its keep-alive
unanswered, and the connection ends after ``UNREACHABLE_SECONDS``. A process that is stopped, or too busy to answer, is
not taken for a dead one, because its kernel answers for it.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import zmq

from flowtrain_lightning.pool.between_hosts.connections import RemoteConnections, identity
from flowtrain_lightning.pool.between_hosts.peer_messages import WINDOWS, EntryReceiver, Outbox, Purpose
from flowtrain_lightning.pool.between_hosts.remote_status import RemoteStatusPage, decode_status, encode_status
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, decode_record, encode_record
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.status_page import Status, StatusPage

UNREACHABLE_SECONDS = 10.0
"""A host that is silent for longer counts as lost, with its ranks. A kernel answers for processes that are stopped."""

_LOOK_SECONDS = 0.1  # how often the own page is looked at
_SEND_SECONDS = 0.25  # how often it is sent though nothing urgent has changed
_MOST_AT_ONCE = 128  # messages that are taken in before those who sent them are told
_COUNT = struct.Struct("<Q")  # an acknowledgement: how many messages have arrived in all


class _Peer:
    """One rank of another host."""

    def __init__(self, page: RemoteStatusPage) -> None:
        self.page = page
        self.outboxes = {purpose: Outbox(identity(page.rank, purpose), WINDOWS[purpose]) for purpose in Purpose}
        self.received = dict.fromkeys(Purpose, 0)
        self.unacknowledged: set[Purpose] = set()
        self.entries = EntryReceiver(page.rank)
        self.heard = time.monotonic()
        self.is_lost = False

    @property
    def settled(self) -> bool:
        return self.is_lost or all(outbox.settled for outbox in self.outboxes.values())

    def lose(self, cause: str) -> None:
        self.is_lost = True
        self.page.lose(cause)
        for outbox in self.outboxes.values():
            outbox.drop()


class HostsThread:
    """Runs from its making until `close`; the other methods may be called by other threads, each by one.

    Args:
        page: of the calling rank.
        connections: to all ranks of other hosts; closed by `close`.
        pages: for each of these ranks the copy of its status page.
        ranks: how many there are in all.
        wake: called when something has arrived.
        fail: called with a sentence and a rank when a peer sends what cannot be true.

    Attributes:
        records: control records that have arrived.
        entries: records of entries that have arrived, with these as payload.
    """

    def __init__(
        self,
        page: StatusPage,
        connections: RemoteConnections,
        pages: Mapping[int, RemoteStatusPage],
        ranks: int,
        wake: Callable[[], None],
        fail: Callable[[str, int | None], None],
    ) -> None:
        self.records: deque[ControlRecord] = deque()
        self.entries: deque[ControlRecord] = deque()
        self._page = page
        self._connections = connections
        self._ranks = ranks
        self._wake = wake
        self._fail = fail
        self._peers = {peer: _Peer(copy) for peer, copy in pages.items()}
        self._of = {identity(peer, purpose): (self._peers[peer], purpose) for peer in pages for purpose in Purpose}
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._urgent: tuple[object, ...] = ()
        self._sent = -1.0
        self._asked = self._answered = 0  # how often `send_status` was called, and how many of these calls are served
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowtrain-hosts", daemon=True)
        self._thread.start()

    def send_record(self, peer: int, message: bytes) -> None:
        """Send an encoded control record, behind those that were sent before. Never waits."""
        self._peers[peer].outboxes[Purpose.RECORDS].add(message)
        os.eventfd_write(self._wake_event, 1)

    def send_entry(self, peer: int, record: ControlRecord, entry: memoryview) -> None:
        """Send a record and an entry, in the order of these calls. Never waits.

        Args:
            peer: a rank of another host.
            record: tells of the entry.
            entry: its bytes, which must not change before the reader has released it.
        """
        self._peers[peer].outboxes[Purpose.ENTRIES].add_entry(record, entry)
        os.eventfd_write(self._wake_event, 1)

    def send_status(self, seconds: float) -> None:
        """Send the status page now, and wait up to ``seconds`` until all has arrived that was sent to other hosts."""
        asked = self._asked = self._asked + 1
        os.eventfd_write(self._wake_event, 1)
        deadline = time.monotonic() + seconds
        while self._answered < asked or not all(peer.settled for peer in self._peers.values()):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)

    def close(self) -> None:
        """End the thread and close the connections; what is not sent is lost."""
        self._closing = True
        os.eventfd_write(self._wake_event, 1)
        self._thread.join()
        self._connections.close()
        os.close(self._wake_event)

    def _run(self) -> None:
        router, ends = self._connections.router, self._connections.events.socket
        poller = zmq.Poller()
        for each in (router, ends, self._wake_event):
            poller.register(each, zmq.POLLIN)
        for message in self._connections.early:
            self._accept(*message)
        self._connections.early.clear()
        while not self._closing:
            self._queue_page()
            self._send_all(router)
            events = dict(poller.poll(round(_LOOK_SECONDS * 1000)))
            if self._wake_event in events:
                os.eventfd_read(self._wake_event)
            if router in events:
                self._receive(router)
            if ends in events:
                self._notice_ends(router)

    def _queue_page(self) -> None:
        """Queue the page when something urgent has changed or it was not sent for a while."""
        asked, status, now = self._asked, self._page.read(), time.monotonic()
        urgent = _urgent(status)
        if urgent == self._urgent and asked == self._answered and now - self._sent < _SEND_SECONDS:
            return
        self._urgent, self._sent = urgent, now
        message = encode_record(ControlRecord(Kind.STATUS, self._page.rank, payload=encode_status(status)))
        for peer in self._peers.values():
            peer.outboxes[Purpose.PAGES].replace(message)
        self._answered = asked

    def _send_all(self, router: zmq.Socket[bytes]) -> None:
        """Tell what has arrived, and send what may be on its way."""
        for peer in self._peers.values():
            for purpose in peer.unacknowledged:
                count = _COUNT.pack(peer.received[purpose])
                _send(router, [peer.outboxes[purpose].identity, b"", count])
            peer.unacknowledged.clear()
            if peer.is_lost:
                continue
            for outbox in peer.outboxes.values():
                while outbox.ready and _send(router, [outbox.identity, outbox.first()]):
                    outbox.is_sent()

    def _receive(self, router: zmq.Socket[bytes]) -> int:
        """Take in what has arrived, up to a limit; how many messages that were."""
        for count in range(_MOST_AT_ONCE):
            try:
                self._accept(*router.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return count
        return _MOST_AT_ONCE

    def _accept(self, name: zmq.Frame, *content: zmq.Frame) -> None:
        peer, purpose = self._of[name.bytes]
        if peer.is_lost:
            return
        peer.heard = time.monotonic()
        try:
            self._take(peer, purpose, [frame.buffer for frame in content])
        except PoolError as error:
            self._fail(str(error), peer.page.rank)
            peer.lose("died (what it sent last was damaged)")

    def _take(self, peer: _Peer, purpose: Purpose, content: list[memoryview]) -> None:
        rank = peer.page.rank
        if len(content) == 2 and len(content[1]) == _COUNT.size:
            if not peer.outboxes[purpose].acknowledge(*_COUNT.unpack(content[1])):
                raise PoolError(f"Rank {rank} acknowledged {purpose.value} that were never sent to it.")
            return
        (message,) = content if len(content) == 1 else (memoryview(b""),)  # which is no record
        peer.received[purpose] += 1
        peer.unacknowledged.add(purpose)
        if purpose is Purpose.ENTRIES:
            entry = peer.entries.take(message)
            if entry is not None:
                self.entries.append(entry)
                self._wake()
            return
        record = decode_record(bytes(message), rank)
        if purpose is Purpose.RECORDS:
            self.records.append(record)
            self._wake()
        elif record.kind is Kind.STATUS:
            peer.page.update(decode_status(rank, self._ranks, record.payload))
        else:
            raise PoolError(f"Rank {rank} sent {record} where its status pages come.")

    def _notice_ends(self, router: zmq.Socket[bytes]) -> None:
        for event in self._connections.events.take():
            if event.kind == zmq.EVENT_DISCONNECTED:
                peer = self._connections.ends.pop(event.descriptor, None)
                if peer is not None:
                    self._notice_end(peer, router)

    def _notice_end(self, peer: int, router: zmq.Socket[bytes]) -> None:
        while self._receive(router):  # what came before the end
            pass
        silent = time.monotonic() - self._peers[peer].heard
        if silent < UNREACHABLE_SECONDS - 1:
            self._peers[peer].lose("died (its connection was closed)")
        else:
            self._peers[peer].lose(f"can no longer be reached (nothing came from it for {silent:.0f} s)")


def _send(router: zmq.Socket[bytes], message: list[bytes | memoryview]) -> bool:
    """Whether the message is on its way. That a connection has ended is an event of its own."""
    try:
        router.send_multipart(message, zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def _urgent(status: Status) -> tuple[object, ...]:
    """Messages that others must have at once."""
    return status.state, status.blames, status.sigterm, status.phase.startswith("wait")
