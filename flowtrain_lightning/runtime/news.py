"""Brings what ranks tell of themselves to the first backbone rank, and makes no rank wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowtrain_lightning.parallel.groups import Groups
from flowtrain_lightning.pool import Key, Mesh, Pool
from flowtrain_lightning.runtime.encoder_lane import STEPS_AHEAD

_PATIENCE = 2 * STEPS_AHEAD
"""Rounds after which nobody looks any more for what an encoder rank may have sent."""


class News:
    """News of one kind, in rounds.

    Backbone ranks meet at the end of a step, and tell each other then. Encoder ranks send theirs through the pool, as
    an encoder that works ahead must not be made to wait: what finds no room is not sent, what has not arrived is in a
    later round, and nothing is sent to a reader whose run is over.

    Args:
        groups: of this rank.
        mesh: of this rank.
        senders: global rank of every encoder rank that has no backbone lane, by its rank within the role.
        reader: global rank of the first backbone rank.
        key: where news are found, by round and encoder rank.
    """

    def __init__(
        self, groups: Groups, mesh: Mesh, senders: Sequence[int], reader: int, key: Callable[[int, int], Key]
    ) -> None:
        self._groups = groups
        self._mesh = mesh
        self._senders = senders
        self._reader = reader
        self._key = key

    def send(self, number: int, encoder_rank: int, news: Any, pool: Pool) -> None:
        """From an encoder rank without a backbone lane.

        Args:
            number: of the round.
            encoder_rank: the calling rank within its role.
            news: what JSON can hold.
            pool: carries it.
        """
        if self._mesh.has_left(self._reader):
            return
        text = torch.frombuffer(bytearray(json.dumps(news).encode()), dtype=torch.uint8)
        # In the room of later steps: so news that nobody has read yet never stand where a step's features must go.
        pool.put(self._key(number, encoder_rank), [text], [self._reader], ahead=True)

    def gather(self, number: int, own: Any, pool: Pool) -> list[Any]:
        """On every backbone rank: the news of all of them, and what has arrived from encoder ranks, alike on all."""
        arrived = []
        if self._groups.cross.rank == self._reader:
            pool.poll()
            arrived = self._arrived(number, pool)
        everyone = self._groups.gather_over_role((own, arrived))
        return [news for news, _ in everyone] + [news for _, arrived in everyone for news in arrived]

    def _arrived(self, number: int, pool: Pool) -> list[Any]:
        found = []
        for index in range(max(0, number - _PATIENCE), number + 1):
            for encoder_rank in range(len(self._senders)):
                lease = pool.get(self._key(index, encoder_rank))
                if lease is not None:
                    found.append(json.loads(bytes(lease.tensors[0].numpy())))
                    lease.release()
        return found
