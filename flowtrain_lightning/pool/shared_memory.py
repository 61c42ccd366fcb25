"""The transport between processes of one machine: every rank maps every segment once, and reads it in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import mmap

from flowtrain_lightning.pool.entry import Memory
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.memory import map_memory
from flowtrain_lightning.pool.record import Kind, Record
from flowtrain_lightning.pool.segment import Segment
from flowtrain_lightning.pool.transport import Publication


class SharedMemoryTransport:
    """Host memory, shared. Tensors on a GPU are copied into it and read from it, unless the device tier takes them."""

    name = "shared_memory"

    def __init__(self, link: Link, segment: Segment, peers: Sequence[int]) -> None:
        self._link = link
        self._segment = segment
        self._peers = peers
        self._memories: dict[int, mmap] = {}

    def announce(self) -> None:
        """Pass the segment's descriptor to all peers."""
        for peer in self._peers:
            record = Record(Kind.SEGMENT, self._link.rank, self._link.number, size=self._segment.nbytes)
            self._link.send(peer, record._replace(descriptors=(self._segment.descriptor,)))

    def ready(self) -> bool:
        """Whether the segments of all peers are mapped."""
        return len(self._memories) == len(self._peers)

    def publish(self, reader: int, publication: Publication) -> None:
        """Tell ``reader`` the address; the bytes stay where they are."""
        publication.send(self._link, reader, Kind.PUBLISH)

    def receive(self, record: Record) -> Publication | None:
        """Map a peer's segment, or learn of an entry."""
        if record.kind is Kind.PUBLISH:
            publication = Publication.from_record(record)
            address, memory = publication.address, self._memories.get(record.sender)
            if memory is None or address.offset + record.size > len(memory):
                raise PoolError(f"Rank {record.sender} published {publication}, which lies outside of its segment.")
            return publication
        if record.kind is not Kind.SEGMENT or len(record.descriptors) != 1 or record.sender in self._memories:
            raise PoolError(f"Rank {record.sender} sent {record}, which shared memory has no use for.")
        (descriptor,) = record.descriptors
        self._memories[record.sender] = map_memory(descriptor, record.size)
        os.close(descriptor)
        return None

    def locate(self, publication: Publication) -> tuple[Memory, int]:
        """The owner's segment itself."""
        return self._memories[publication.address.owner], publication.address.offset

    def release(self, publication: Publication) -> None:
        """Tell the owner."""
        publication.send(self._link, publication.address.owner, Kind.RELEASE)

    def close(self) -> None:
        """Drop the mappings; the last tensor that is a view of one unmaps it."""
        self._memories.clear()
