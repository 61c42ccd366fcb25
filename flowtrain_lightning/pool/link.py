"""The part of a mesh's traffic that belongs to one pool: several may be opened on a mesh, one after another."""

from __future__ import annotations

import os

from flowtrain_lightning.pool.mesh import Mesh, Message
from flowtrain_lightning.pool.record import Kind, Record


class Link:
    """Sends and receives the records of one pool.

    Ranks do not open a pool at the same moment: records of a pool that is not open here yet are kept for it, and
    those of a pool that was replaced are dropped.

    Args:
        mesh: connects the ranks. Links are numbered in the order in which they are made, alike on all ranks.

    Attributes:
        rank: the calling rank.
        peers: all other ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        mesh.links += 1
        self._mesh = mesh
        self._number = mesh.links
        self.rank = mesh.rank
        self.peers = tuple(peer for peer in range(mesh.ranks) if peer != mesh.rank)
        self._early, mesh.early = mesh.early, []

    def send(
        self,
        peer: int,
        kind: Kind,
        *,
        channel: int = 0,
        number: int = 0,
        address: int = 0,
        size: int = 0,
        start: int = 0,
        payload: bytes = b"",
        descriptor: int | None = None,
    ) -> None:
        """Send a record to ``peer``; see `Record` and `Mesh.send`."""
        record = Record(kind, self.rank, self._number, channel, number, address, size, start)
        self._mesh.send(peer, record, payload, descriptor)

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """What has arrived for this pool; waits up to ``timeout`` seconds for something. See `Mesh.receive`."""
        arrived = self._mesh.receive(0.0 if self._early else timeout)
        if self._early:
            arrived, self._early = self._early + arrived, []
        return [message for message in arrived if self._is_ours(message)]

    def has_left(self, peer: int) -> bool:
        """Whether ``peer`` has left in good order."""
        return self._mesh.has_left(peer)

    def _is_ours(self, message: Message) -> bool:
        number = message.record.link
        if number > self._number:
            self._mesh.early.append(message)
        elif number < self._number and message.descriptor is not None:
            os.close(message.descriptor)
        return number == self._number
