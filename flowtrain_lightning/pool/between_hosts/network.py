"""Ranks of other hosts: their status pages, what arrives from them, and the transport that sends entries there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.between_hosts.connections import RemoteConnections
from flowtrain_lightning.pool.between_hosts.hosts_thread import HostsThread
from flowtrain_lightning.pool.between_hosts.remote_status import RemoteStatusPage
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.entry import Memory
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.shared_memory import Segment
from flowtrain_lightning.pool.status_page import StatusPage


class RemoteHosts:
    """All ranks of other hosts. Runs a thread until `close`, if there are any.

    Args:
        page: of the calling rank.
        labels: one per rank.
        connections: to ranks of other hosts; None where there are none.
        wake: called when something has arrived.
        fail: called with a sentence and a rank when a peer sends what cannot be true.

    Attributes:
        pages: copies of the status pages of these ranks.
        records: control records that have arrived, in the order of each rank.
        arrived: records of what has arrived otherwise, such as entries with their bytes.
    """

    def __init__(
        self,
        page: StatusPage,
        labels: Sequence[str],
        connections: RemoteConnections | None,
        wake: Callable[[], None],
        fail: Callable[[str, int | None], None],
    ) -> None:
        self.pages: dict[int, RemoteStatusPage] = {}
        self.records: deque[ControlRecord] = deque()
        self.arrived: deque[ControlRecord] = deque()
        self._wake = wake
        self._thread: HostsThread | None = None
        if connections is not None:
            self.pages = {peer: RemoteStatusPage(peer, labels[peer]) for peer in connections.peers}
            self._thread = HostsThread(page, connections, self.pages, len(labels), wake, fail)
            self.records, self.arrived = self._thread.records, self._thread.entries

    def send_status(self, timeout: float) -> None:
        """Let the other hosts know now what the own status page says.

        Args:
            timeout: seconds to wait until they have it, and all that was sent to them before.
        """
        if self._thread is not None:
            self._thread.send_status(timeout)

    def send_record(self, peer: int, message: bytes) -> None:
        """Send an encoded control record; see `HostsThread.send_record`."""
        assert self._thread is not None, "there are no other hosts"
        self._thread.send_record(peer, message)

    def send_entry(self, peer: int, record: ControlRecord, entry: memoryview) -> None:
        """Send a record and the bytes of an entry; see `HostsThread.send_entry`."""
        assert self._thread is not None, "there are no other hosts"
        self._thread.send_entry(peer, record, entry)

    def add(self, record: ControlRecord) -> None:
        """Add a record to what has arrived. Safe to call from any thread."""
        self.arrived.append(record)
        self._wake()

    def close(self, timeout: float) -> None:
        """Send the page a last time and end.

        Args:
            timeout: seconds for what is on its way to arrive: to close a connection may cut it off.
        """
        if self._thread is not None:
            self._thread.send_status(timeout)
            self._thread.close()


class RemoteTransport(Protocol):
    """Passes published entries between hosts.

    The pool keeps the books; a transport only moves bytes and records. Adding one means filling these methods; the
    contract tests say what they must do.
    """

    name: str

    def announce(self) -> None:
        """Tell the remote peers of the own segment."""

    def ready(self) -> bool:
        """Whether the segments of all remote peers are known."""

    def publish(self, reader: int, record: ControlRecord) -> None:
        """Make the entry of the own segment that this record publishes readable by ``reader``. Never waits."""

    def receive(self, record: ControlRecord) -> ControlRecord | None:
        """Take a record from a remote peer that is not for the pool's books.

        Returns:
            The record that published the entry which is readable now, if one became so.

        Raises:
            PoolError: when it tells of bytes outside of its sender's segment.
        """

    def locate(self, published: ControlRecord) -> tuple[Memory, int]:
        """The memory that holds a readable entry, and where in it the entry begins."""

    def forget(self, address: int) -> None:
        """Drop what was kept of the entry at ``address``, which this reader has released, if anything was."""

    def close(self) -> None:
        """Drop all memory."""


class NetworkTransport:
    """A thread sends entries when they are published; each reader keeps a copy until it releases it.

    Args:
        hosts: carries them.
        segment: of the calling rank.
        rank: the calling rank.
        link: number of the link that the records belong to.
    """

    name = "network"

    def __init__(self, hosts: RemoteHosts, segment: Segment, rank: int, link: int) -> None:
        self._hosts = hosts
        self._segment = segment
        self._rank = rank
        self._link = link
        self._peers = hosts.pages.keys()
        self._known: set[int] = set()  # peers whose segment is known
        self._copies: dict[int, bytearray] = {}  # address -> the entry

    def announce(self) -> None:
        """Tell the size of the own segment, the bound of what can be on its way."""
        record = ControlRecord(Kind.SEGMENT, self._rank, self._link, size=self._segment.nbytes)
        for peer in self._peers:
            self._hosts.send_entry(peer, record, memoryview(b""))

    def ready(self) -> bool:
        """Whether the segments of all remote peers are known."""
        return len(self._known) == len(self._peers)

    def publish(self, reader: int, record: ControlRecord) -> None:
        """Hand the entry to the thread that talks to other hosts."""
        start = Address(record.address).offset
        self._hosts.send_entry(reader, record, memoryview(self._segment.memory)[start : start + record.size])

    def receive(self, record: ControlRecord) -> ControlRecord | None:
        """Learn of a segment, or of an entry, which comes with its bytes."""
        payload = record.payload
        if record.kind is Kind.PUBLISH and isinstance(payload, bytearray) and len(payload) == record.size:
            self._copies[record.address] = payload
            return record._replace(payload=b"")
        if record.kind is not Kind.SEGMENT or record.sender in self._known:
            raise PoolError(f"Rank {record.sender} sent {record._replace(payload=b'')}, which is no whole entry.")
        self._known.add(record.sender)
        return None

    def locate(self, published: ControlRecord) -> tuple[Memory, int]:
        """The reader's own copy."""
        return self._copies[published.address], 0

    def forget(self, address: int) -> None:
        """Drop the copy."""
        self._copies.pop(address, None)

    def close(self) -> None:
        """Drop all copies."""
        self._copies.clear()
