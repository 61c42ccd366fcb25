"""Which transport connects each two ranks: shared memory within a host, the network between hosts."""

from __future__ import annotations

from typing import Literal

from flowtrain_lightning.pool.between_hosts.network import NetworkTransport
from flowtrain_lightning.pool.between_hosts.nixl import NixlTransport
from flowtrain_lightning.pool.entry import Memory
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.record import Record
from flowtrain_lightning.pool.segment import Segment
from flowtrain_lightning.pool.shared_memory import SharedMemoryTransport
from flowtrain_lightning.pool.transport import Publication, Transport

NetworkChoice = Literal["auto", "nixl"]
"""What may be chosen between hosts."""

TransportName = Literal["auto", "shared_memory", "nixl"]


def choose_transport(name: TransportName, link: Link, segment: Segment) -> Transport:
    """The transport of a pool.

    Args:
        name: ``"auto"`` takes for each peer the fastest that is sure to reach it; ``"nixl"`` takes that one between
            hosts, and shared memory within them; any other takes that one for all.
        link: reaches all peers.
        segment: of the calling rank.

    Raises:
        PoolError: when the one asked for does not reach all peers.
    """
    far = link.elsewhere
    near = [peer for peer in link.peers if peer not in far]
    if not far:
        return SharedMemoryTransport(link, segment, near)
    if name == "shared_memory":
        raise PoolError(f"Shared memory was asked for, but ranks {far} run on other hosts. Use transport='auto'.")
    between = NixlTransport(link, segment, far) if name == "nixl" else NetworkTransport(link, segment, far)
    return TransportByPeer(SharedMemoryTransport(link, segment, near), near, between) if near else between


class TransportByPeer:
    """Two transports as one.

    Args:
        one: carries entries to and from some peers.
        peers: these peers.
        other: carries those of all others.
    """

    def __init__(self, one: Transport, peers: list[int], other: Transport) -> None:
        self.name = f"{one.name} and {other.name}"
        self._one = one
        self._peers = frozenset(peers)
        self._other = other

    def announce(self) -> None:
        """Tell all peers of the own segment."""
        self._one.announce()
        self._other.announce()

    def ready(self) -> bool:
        """Whether the segments of all peers are known."""
        return self._one.ready() and self._other.ready()

    def publish(self, reader: int, publication: Publication) -> None:
        """Make an entry readable by ``reader``."""
        self._of(reader).publish(reader, publication)

    def receive(self, record: Record) -> Publication | None:
        """Take a record that is not for the pool's books."""
        return self._of(record.sender).receive(record)

    def locate(self, publication: Publication) -> tuple[Memory, int]:
        """The memory that holds a readable entry, and where in it the entry begins."""
        return self._of(publication.address.owner).locate(publication)

    def release(self, publication: Publication) -> None:
        """Tell the owner that this reader has done with an entry."""
        self._of(publication.address.owner).release(publication)

    def close(self) -> None:
        """Drop all memory."""
        self._one.close()
        self._other.close()

    def _of(self, peer: int) -> Transport:
        return self._one if peer in self._peers else self._other
