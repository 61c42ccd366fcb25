"""The part of a mesh's traffic that belongs to one pool: several may be opened on a mesh, one after another."""

from __future__ import annotations

import os

from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.record import Record


class Link:
    """Sends and receives the records of one pool.

    Ranks do not open a pool at the same moment: records of a pool that is not open here yet are kept for it, and
    those of a pool that was replaced are dropped.

    Args:
        mesh: connects the ranks. Links are numbered in the order in which they are made, alike on all ranks.

    Attributes:
        rank: the calling rank.
        number: of this link; it stands in each of its records.
        peers: all other ranks.
        elsewhere: those of other hosts.
    """

    def __init__(self, mesh: Mesh) -> None:
        mesh.links += 1
        self._mesh = mesh
        self.number = mesh.links
        self.rank = mesh.rank
        self.peers = tuple(peer for peer in range(mesh.ranks) if peer != mesh.rank)
        self.elsewhere = tuple(mesh.elsewhere.copies)
        self._early, mesh.early = mesh.early, []

    def send(self, peer: int, record: Record) -> None:
        """Send a record, which carries the number of this link, to ``peer``; see `Mesh.send`."""
        self._mesh.send(peer, record)

    def carry(self, peer: int, record: Record, entry: memoryview) -> None:
        """Let the service thread send an entry to a rank of another host; see `Carrier.send`.

        Raises:
            PoolError: when the peer has left in good order.
        """
        if self._mesh.has_left(peer):
            raise PoolError(f"Rank {peer} ({self._mesh.labels[peer]}) has left; nothing can be sent to it any more.")
        self._mesh.elsewhere.carry(peer, record, entry)

    def arrive(self, record: Record) -> None:
        """Let `receive` hand out a record that a thread of this rank has made; see `Elsewhere.arrive`."""
        self._mesh.elsewhere.arrive(record)

    def receive(self, timeout: float = 0.0) -> list[Record]:
        """What has arrived for this pool; waits up to ``timeout`` seconds for something. See `Mesh.receive`."""
        arrived = self._mesh.receive(0.0 if self._early else timeout)
        if self._early:
            arrived, self._early = self._early + arrived, []
        for record in arrived:
            if record.link != self.number:
                return [record for record in arrived if self._is_ours(record)]
        return arrived

    def has_left(self, peer: int) -> bool:
        """Whether ``peer`` has left in good order."""
        return self._mesh.has_left(peer)

    def _is_ours(self, record: Record) -> bool:
        if record.link > self.number:
            self._mesh.early.append(record)
        elif record.link < self.number:
            for descriptor in record.descriptors:
                os.close(descriptor)
        return record.link == self.number
