"""Puts the records of each peer into the order in which it sent them: they come by two ways, an inbox and a socket."""

from __future__ import annotations

from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.record import Kind, Numbered, Record


class RecordOrder:
    """Which record of each peer comes next.

    Args:
        ranks: how many there are.

    Attributes:
        goodbyes: peers that have said goodbye since someone last looked; whoever looks clears it.
    """

    def __init__(self, ranks: int) -> None:
        self._received = [0] * ranks
        self._held: dict[int, dict[int, Record]] = {}  # peer -> place -> what came before its turn, by the other way
        self._left: set[int] = set()
        self.goodbyes: list[int] = []

    def take(self, found: list[Numbered]) -> list[Record]:
        """The records whose turn it is, of those that came by one way and of those that were held back before.

        Raises:
            PoolError: when a record came twice, or after a goodbye.
        """
        records: list[Record] = []
        for place, record in found:
            peer = record.sender
            turn = self._received[peer] + 1
            if place < turn or peer in self._left:
                raise PoolError(f"A control record from rank {peer} was refused: it came twice, or after a goodbye.")
            if place > turn:
                self._held.setdefault(peer, {})[place] = record
                continue
            self._received[peer] = turn
            if record.kind is Kind.GOODBYE:
                self.forget(peer)
                self.goodbyes.append(peer)
                continue
            records.append(record)
            if peer in self._held:
                waiting = self._held.pop(peer)
                records += self.take(sorted(waiting.items()))
        return records

    def forget(self, peer: int) -> None:
        """Nothing more is to come from ``peer``."""
        self._left.add(peer)
        self._held.pop(peer, None)
