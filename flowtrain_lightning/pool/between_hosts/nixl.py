"""The transport between hosts by NIXL: each reader fetches an entry out of its owner's memory into a mirror of that.

The owner registers its segment once, and sends a record per entry; where the network has RDMA its processor does no
more. A reader mirrors the segments of those who publish to it, so an entry has its place there and none is searched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import mmap
from typing import NamedTuple

from flowtrain_lightning.pool.between_hosts.agent import Agent
from flowtrain_lightning.pool.between_hosts.fetcher import Fetch, Fetched, Fetcher
from flowtrain_lightning.pool.entry import HEAD_BYTES, Memory
from flowtrain_lightning.pool.errors import PeerFailed, PoolError
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.memory import create_memory, map_memory
from flowtrain_lightning.pool.record import MAX_PAYLOAD, Kind, Record
from flowtrain_lightning.pool.segment import Segment
from flowtrain_lightning.pool.transport import Publication


class _Far(NamedTuple):
    """The segment of a peer: the name of its agent, where it begins in the peer's address space, and its bytes."""

    name: str
    base: int
    nbytes: int


class _Mirror(NamedTuple):
    """What was fetched of a peer's segment, each entry at the offset that it has there."""

    memory: mmap
    base: int


class NixlTransport:
    """Entries are fetched when they are published.

    Raises:
        PoolError: when NIXL is not there, or cannot use this machine's network.
    """

    name = "nixl"

    def __init__(self, link: Link, segment: Segment, peers: Sequence[int]) -> None:
        self._link = link
        self._segment = segment
        self._peers = peers
        self._agent = Agent()
        self._base = self._agent.register(segment.memory)
        self._far: dict[int, _Far] = {}
        self._mirrors: dict[int, _Mirror] = {}
        self._fetcher = Fetcher(self._agent, link.arrive)

    def announce(self) -> None:
        """Tell the peers how to reach the own segment."""
        metadata = self._agent.metadata()
        if len(metadata) > MAX_PAYLOAD:
            raise PoolError(
                f"NIXL needs {len(metadata):,} bytes to say how this rank is reached; {MAX_PAYLOAD:,} can be sent. "
                "Name fewer network devices in the environment variable UCX_NET_DEVICES."
            )
        for peer in self._peers:
            record = Record(Kind.SEGMENT, self._link.rank, self._link.number, payload=metadata)
            self._link.send(peer, record._replace(address=self._base, size=self._segment.nbytes))

    def ready(self) -> bool:
        """Whether the segments of these peers are known."""
        return len(self._far) == len(self._peers)

    def publish(self, reader: int, publication: Publication) -> None:
        """Tell ``reader``, who fetches it."""
        publication.send(self._link, reader, Kind.PUBLISH)

    def receive(self, record: Record) -> Publication | None:
        """Learn of a segment, begin to fetch an entry, or learn that it is here."""
        owner = record.sender
        if record.kind is Kind.SEGMENT and owner not in self._far:
            self._far[owner] = _Far(self._agent.meet(bytes(record.payload)), record.address, record.size)
            return None
        if record.kind is not Kind.PUBLISH or owner not in self._far:
            raise PoolError(f"Rank {owner} sent {record._replace(payload=b'')}, which NIXL has no use for.")
        publication = Publication.from_record(record)
        if isinstance(record.payload, Fetched):
            return self._fetched(publication, record.payload)
        self._fetch(record, publication)
        return None

    def locate(self, publication: Publication) -> tuple[Memory, int]:
        """The mirror of its owner's segment."""
        return self._mirrors[publication.address.owner].memory, publication.address.offset

    def release(self, publication: Publication) -> None:
        """Tell the owner."""
        publication.send(self._link, publication.address.owner, Kind.RELEASE)

    def close(self) -> None:
        """End all transfers, then drop the mirrors; the last tensor that is a view of one unmaps it."""
        self._fetcher.close()
        self._agent.close()
        self._mirrors.clear()

    def _fetch(self, record: Record, publication: Publication) -> None:
        far, address = self._far[record.sender], publication.address
        start, end = address.offset, address.offset + publication.nbytes
        if publication.nbytes < HEAD_BYTES or end > far.nbytes:
            raise PoolError(f"Rank {record.sender} published {publication}, which lies outside of its segment.")
        mirror = self._mirror(record.sender)
        self._fetcher.fetch(Fetch(record, far.name, far.base + start, mirror.base + start))

    def _fetched(self, publication: Publication, failed: Fetched) -> Publication | None:
        owner = publication.address.owner
        if not failed:
            return publication
        if self._link.has_left(owner):
            return None
        raise PeerFailed(f"{publication.key} could not be fetched from rank {owner}: {failed.decode()}", owner)

    def _mirror(self, owner: int) -> _Mirror:
        """Made when the owner publishes something: peers that exchange nothing need no memory for each other."""
        mirror = self._mirrors.get(owner)
        if mirror is None:
            name = f"flowtrain mirror on rank {self._link.rank} of rank {owner}"
            descriptor = create_memory(name, self._far[owner].nbytes)
            memory = map_memory(descriptor, self._far[owner].nbytes)
            os.close(descriptor)
            mirror = self._mirrors[owner] = _Mirror(memory, self._agent.register(memory))
        return mirror
