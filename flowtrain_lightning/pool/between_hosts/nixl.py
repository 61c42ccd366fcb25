"""The transport between hosts by NIXL: each reader fetches an entry out of its owner's memory into a mirror of that.

The owner registers its segment once, and sends a record per entry; where the network has RDMA its processor does no
more. A reader mirrors the segments of those who publish to it, so an entry lies at the same offset there.
"""

from __future__ import annotations

import os
from mmap import mmap
from typing import NamedTuple

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.between_hosts.nixl_agent import Fetch, Fetched, Fetcher, NixlAgent
from flowtrain_lightning.pool.control_records import MAX_PAYLOAD, ControlRecord, Kind
from flowtrain_lightning.pool.entry import Key, Memory
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool_errors import PeerFailed, PoolError
from flowtrain_lightning.pool.shared_memory import Segment, create_memory, map_memory


class _RemoteSegment(NamedTuple):
    """The segment of a peer: the name of its agent, where it begins in the peer's address space, and its bytes."""

    name: str
    base: int
    nbytes: int


class _Mirror(NamedTuple):
    """The fetched part of a peer's segment, each entry at the offset that it has there."""

    memory: mmap
    base: int


class NixlTransport:
    """Readers fetch entries when they are published.

    Args:
        mesh: carries the records; its link is that of the pool.
        segment: of the calling rank.

    Raises:
        PoolError: when NIXL is not there, or cannot use this host's network.
    """

    name = "nixl"

    def __init__(self, mesh: Mesh, segment: Segment) -> None:
        self._mesh = mesh
        self._segment = segment
        self._link = mesh.link
        self._peers = mesh.remote.pages.keys()
        self._agent = NixlAgent()
        self._base = self._agent.register(segment.memory)
        self._segments: dict[int, _RemoteSegment] = {}
        self._mirrors: dict[int, _Mirror] = {}
        self._fetcher = Fetcher(self._agent, mesh.remote.add)

    def announce(self) -> None:
        """Tell the peers how to reach the own segment."""
        metadata = self._agent.metadata()
        if len(metadata) > MAX_PAYLOAD:
            raise PoolError(
                f"NIXL needs {len(metadata):,} bytes to say how this rank is reached; {MAX_PAYLOAD:,} can be sent. "
                "Name fewer network devices in the environment variable UCX_NET_DEVICES."
            )
        size = self._segment.nbytes
        record = ControlRecord(
            Kind.SEGMENT, self._mesh.rank, self._link, address=self._base, size=size, payload=metadata
        )
        for peer in self._peers:
            self._mesh.send(peer, record)

    def ready(self) -> bool:
        """Whether the segments of all remote peers are known."""
        return len(self._segments) == len(self._peers)

    def publish(self, reader: int, record: ControlRecord) -> None:
        """Tell ``reader``, who fetches it."""
        self._mesh.send(reader, record)

    def receive(self, record: ControlRecord) -> ControlRecord | None:
        """Learn of a segment, begin to fetch an entry, or learn that it is here."""
        owner = record.sender
        if record.kind is Kind.SEGMENT and owner not in self._segments:
            name = self._agent.add_peer(bytes(record.payload))
            self._segments[owner] = _RemoteSegment(name, record.address, record.size)
            return None
        if record.kind is not Kind.PUBLISH or owner not in self._segments:
            raise PoolError(f"Rank {owner} sent {record._replace(payload=b'')}, which NIXL has no use for.")
        if isinstance(record.payload, Fetched):
            return self._fetched(record, record.payload)
        self._fetch(record)
        return None

    def locate(self, published: ControlRecord) -> tuple[Memory, int]:
        """The mirror of its owner's segment."""
        return self._mirrors[published.sender].memory, Address(published.address).offset

    def forget(self, address: int) -> None:
        """Nothing is kept but the mirror."""

    def close(self) -> None:
        """End all transfers, then drop the mirrors; the last tensor that is a view of one unmaps it."""
        self._fetcher.close()
        self._agent.close()
        self._mirrors.clear()

    def _fetch(self, record: ControlRecord) -> None:
        segment, address = self._segments[record.sender], Address(record.address)
        if address.owner != record.sender or not 0 < record.size <= segment.nbytes - address.offset:
            raise PoolError(f"Rank {record.sender} published {record}, which lies outside of its segment.")
        source, target = segment.base + address.offset, self._mirror(record.sender).base + address.offset
        self._fetcher.fetch(Fetch(record, segment.name, source, target))

    def _fetched(self, record: ControlRecord, reason: Fetched) -> ControlRecord | None:
        if not reason:
            return record._replace(payload=b"")
        if self._mesh.has_left(record.sender):
            return None
        key = Key.unpack(record.channel, record.number)
        raise PeerFailed(f"{key} could not be fetched from rank {record.sender}: {reason.decode()}", record.sender)

    def _mirror(self, owner: int) -> _Mirror:
        """Made when the owner publishes something: peers that exchange nothing need no memory for each other."""
        mirror = self._mirrors.get(owner)
        if mirror is None:
            nbytes = self._segments[owner].nbytes
            descriptor = create_memory(f"flowtrain mirror on rank {self._mesh.rank} of rank {owner}", nbytes)
            memory = map_memory(descriptor, nbytes)
            os.close(descriptor)
            mirror = self._mirrors[owner] = _Mirror(memory, self._agent.register(memory))
        return mirror
