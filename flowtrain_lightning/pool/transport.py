"""Brings entries to readers: they map the segments of their host once; other hosts are reached by a transport."""

from __future__ import annotations

from mmap import mmap
from typing import Literal

from flowtrain_lightning.pool.between_hosts.network import NetworkTransport, RemoteTransport
from flowtrain_lightning.pool.between_hosts.nixl import NixlTransport
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.shared_memory import Segment, map_memory
from flowtrain_lightning.pool.socket_stream import close_descriptors

NetworkChoice = Literal["auto", "nixl"]
"""The transport of entries between hosts: ``"auto"``, TCP, which works everywhere, or NIXL."""


class Transport:
    """The segments of a pool, as one rank reaches them.

    Args:
        mesh: connects the ranks; its link is that of the pool.
        segment: of the calling rank.
        network: how entries pass between hosts, equal on all ranks.

    Attributes:
        name: how entries reach their readers, for logs.
        memories: the segments of the ranks of this host that are known, by rank.
        remote: reaches the ranks of other hosts; None where there are none.

    Raises:
        PoolError: when NIXL was chosen and is not there, or cannot use this host's network.
    """

    def __init__(self, mesh: Mesh, segment: Segment, network: NetworkChoice) -> None:
        self.memories: dict[int, mmap] = {mesh.rank: segment.memory}
        self.remote: RemoteTransport | None = None
        self._mesh = mesh
        self._segment = segment
        self._link = mesh.link
        self._local_peers = set(range(mesh.ranks)) - {mesh.rank} - mesh.remote.pages.keys()
        if mesh.remote.pages and network == "nixl":
            self.remote = NixlTransport(mesh, segment)
        elif mesh.remote.pages:
            self.remote = NetworkTransport(mesh.remote, segment, mesh.rank, mesh.link)
        names = ["shared_memory"] if self._local_peers or self.remote is None else []
        self.name = " and ".join(names if self.remote is None else [*names, self.remote.name])

    def announce(self) -> None:
        """Tell all peers of the own segment."""
        descriptors = (self._segment.descriptor,)
        record = ControlRecord(
            Kind.SEGMENT, self._mesh.rank, self._link, size=self._segment.nbytes, descriptors=descriptors
        )
        for peer in self._local_peers:
            self._mesh.send(peer, record)
        if self.remote is not None:
            self.remote.announce()

    def ready(self) -> bool:
        """Whether the segments of all peers are known."""
        return len(self.memories) > len(self._local_peers) and (self.remote is None or self.remote.ready())

    def receive(self, record: ControlRecord) -> ControlRecord | None:
        """Take the segment of a rank of this host, or any record from a rank of another one.

        Returns:
            The record that published the entry which is readable now, if one became so.

        Raises:
            PoolError: when it tells of something that cannot be.
        """
        sender = record.sender
        if self.remote is not None and sender not in self._local_peers:
            return self.remote.receive(record)
        try:
            if record.kind is not Kind.SEGMENT or len(record.descriptors) != 1 or sender in self.memories:
                raise PoolError(f"Rank {sender} sent {record}, for which shared memory has no use.")
            self.memories[sender] = map_memory(record.descriptors[0], record.size)
        finally:
            close_descriptors(record.descriptors)
        return None

    def close(self) -> None:
        """Drop all mappings; the last tensor that is a view of one unmaps it."""
        self.memories.clear()
        if self.remote is not None:
            self.remote.close()
