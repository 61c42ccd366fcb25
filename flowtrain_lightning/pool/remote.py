"""A transport that shares no memory: the bytes of an entry travel in messages, and each reader keeps a copy.

It stands for a machine elsewhere and keeps the interface honest; between processes of one machine shared memory is
faster by far.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain_lightning.pool.copies import ReaderCopies
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.record import MAX_PAYLOAD, Kind, Record
from flowtrain_lightning.pool.segment import Segment
from flowtrain_lightning.pool.transport import Publication


class RemoteTransport(ReaderCopies):
    """Entries are sent as a whole when they are published."""

    name = "remote"

    def __init__(self, link: Link, segment: Segment, peers: Sequence[int]) -> None:
        super().__init__(link)
        self._segment = segment
        self._peers = peers
        self._sizes: dict[int, int] = {}  # peer -> bytes of its segment
        self._arriving: dict[int, tuple[Publication, int]] = {}  # address -> what it will be, bytes so far

    def announce(self) -> None:
        """Tell all peers the segment's size, the bound of what they may have to keep."""
        for peer in self._peers:
            self._link.send(peer, Record(Kind.SEGMENT, self._link.rank, self._link.number, size=self._segment.nbytes))

    def ready(self) -> bool:
        """Whether the sizes of all peers are known."""
        return len(self._sizes) == len(self._peers)

    def publish(self, reader: int, publication: Publication) -> None:
        """Send the entry: first what it is, then its bytes in pieces."""
        address = publication.address
        publication.send(self._link, reader, Kind.PUBLISH)
        for start in range(0, publication.nbytes, MAX_PAYLOAD):
            first = address.offset + start
            piece = self._segment.memory[first : first + min(MAX_PAYLOAD, publication.nbytes - start)]
            record = Record(Kind.DATA, self._link.rank, self._link.number, address=address, start=start, payload=piece)
            self._link.send(reader, record)

    def withdraw(self, publication: Publication) -> None:
        """It was sent as a copy already."""

    def receive(self, record: Record) -> Publication | None:
        """Learn of an entry, or take a piece of it; it is readable with its last piece."""
        if record.kind is Kind.SEGMENT:
            self._sizes[record.sender] = record.size
        elif record.kind is Kind.PUBLISH:
            publication = Publication.from_record(record)
            if publication.address.offset + publication.nbytes > self._sizes.get(record.sender, 0):
                raise PoolError(f"Rank {record.sender} published {publication}, which lies outside of its segment.")
            self._copies[record.address] = bytearray(publication.nbytes)
            self._arriving[record.address] = (publication, 0)
        elif record.kind is Kind.DATA:
            return self._take(record)
        else:
            raise PoolError(f"Rank {record.sender} sent {record}, which this transport has no use for.")
        return None

    def close(self) -> None:
        """Drop all copies."""
        super().close()
        self._arriving.clear()

    def _take(self, record: Record) -> Publication | None:
        payload = record.payload
        publication, arrived = self._arriving.get(record.address, (None, 0))
        if (
            publication is None
            or publication.address.owner != record.sender
            or record.start != arrived
            or arrived + len(payload) > publication.nbytes
        ):
            raise PoolError(f"Rank {record.sender} sent bytes that belong to no entry: {record}.")
        arrived += len(payload)
        self._copies[record.address][record.start : arrived] = payload
        if arrived < publication.nbytes:
            self._arriving[record.address] = (publication, arrived)
            return None
        del self._arriving[record.address]
        return publication
