"""The transport between hosts: a thread sends entries over TCP, and each reader keeps a copy until it releases it."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain_lightning.pool.copies import ReaderCopies
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.record import Kind, Record
from flowtrain_lightning.pool.segment import Segment
from flowtrain_lightning.pool.transport import Publication


class NetworkTransport(ReaderCopies):
    """Entries are sent as a whole when they are published, straight from the owner's segment."""

    name = "network"

    def __init__(self, link: Link, segment: Segment, peers: Sequence[int]) -> None:
        super().__init__(link)
        self._segment = segment
        self._peers = peers
        self._known: set[int] = set()  # peers whose segment is known

    def announce(self) -> None:
        """Tell the peers the segment's size, the bound of what can be on its way to them."""
        for peer in self._peers:
            record = Record(Kind.SEGMENT, self._link.rank, self._link.number, size=self._segment.nbytes)
            self._link.carry(peer, record, memoryview(b""))

    def ready(self) -> bool:
        """Whether the segments of these peers are known."""
        return len(self._known) == len(self._peers)

    def publish(self, reader: int, publication: Publication) -> None:
        """Hand the entry to the service thread."""
        key, number, address, nbytes = publication
        entry = memoryview(self._segment.memory)[address.offset : address.offset + nbytes]
        record = Record(Kind.PUBLISH, self._link.rank, self._link.number, key.channel, number, address, nbytes)
        self._link.carry(reader, record, entry)

    def receive(self, record: Record) -> Publication | None:
        """Learn of a segment, or of an entry, which comes with its bytes."""
        payload = record.payload
        if record.kind is Kind.PUBLISH and isinstance(payload, bytearray) and len(payload) == record.size:
            publication = Publication.from_record(record)
            self._copies[publication.address] = payload
            return publication
        if record.kind is not Kind.SEGMENT or record.sender in self._known:
            raise PoolError(f"Rank {record.sender} sent {record._replace(payload=b'')}, which is no whole entry.")
        self._known.add(record.sender)
        return None
