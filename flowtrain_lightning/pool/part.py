"""One of the two parts of a segment: room for entries of any size, some of it promised to entries that will come."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flowtrain_lightning.pool.address import aligned
from flowtrain_lightning.pool.arena import Arena
from flowtrain_lightning.pool.counters import Occupancy
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key
from flowtrain_lightning.pool.reservations import Reservation, lay_out


class Part:
    """An arena, and in it a block of places that are promised to reserved entries.

    A reserved entry goes into its place or, while that is still taken, anywhere else where there is room. So it waits
    no longer than until those before it that lie in its place are released.

    Args:
        start: where the first byte lies, a multiple of the alignment.
        capacity: bytes.

    Attributes:
        capacity: bytes that can be given out in all.
    """

    def __init__(self, start: int, capacity: int) -> None:
        self._arena = Arena(start, capacity)
        self.capacity = self._arena.capacity
        self._used = self._peak = 0  # bytes of entries
        self._block: _Block | None = None  # of the latest reservation
        self._promised: dict[Key, _Place] = {}  # in it, to entries that were not put yet
        self._placed: dict[int, _Block] = {}  # offset of an entry that took its place -> where that is

    def reserve(self, order: Mapping[Key, Reservation]) -> bool:
        """Promise room to these entries, in the order in which they will be put. The former promise ends.

        Returns:
            Whether there was room to promise. If not, releases make some; ask again.

        Raises:
            PoolError: when there never will be.
        """
        places = lay_out(list(order.values()), self.capacity)
        self._promised.clear()
        if self._block is not None:
            self._settle(self._block)
        if not order:
            return True
        base = self._arena.allocate(places.capacity)
        if base is None:
            return False
        block = self._block = _Block(base)
        for (key, reservation), offset in zip(order.items(), places.offsets, strict=True):
            self._promised[key] = _Place(block, base + offset, aligned(reservation.nbytes))
        return True

    def has_room(self, keys: Sequence[Key]) -> bool:
        """Whether these entries, for all of which room is reserved, could be put now, in the order of the reservation.

        Raises:
            PoolError: when one of them was not reserved, or was put already.
        """
        elsewhere = []
        for key in keys:
            place = self._promised.get(key)
            if place is None:
                raise PoolError(f"No room is reserved for {key}. Reserve it before, and ask before it is put.")
            if not place.is_free:
                elsewhere.append(place.nbytes)
        return self._arena.fits(elsewhere)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether entries of these sizes, for which no room is reserved, could be put now, in that order."""
        return self._arena.fits(sizes)

    def allocate(self, key: Key, nbytes: int) -> int | None:
        """Take room for an entry.

        Returns:
            The offset of its first byte, or None when there is no room now.

        Raises:
            PoolError: when less was reserved for it.
        """
        place = self._promised.get(key)
        offset = self._arena.allocate(nbytes) if place is None else self._allocate_reserved(key, nbytes, place)
        if offset is not None:
            self._used += aligned(nbytes)
            self._peak = max(self._peak, self._used)
        return offset

    def free(self, offset: int) -> None:
        """Give back the room of the entry at ``offset``.

        Raises:
            KeyError: when no room that was given out begins there.
        """
        block = self._placed.pop(offset, None)
        if block is None:
            self._used -= self._arena.free(offset)
        else:
            self._used -= block.free(offset)
            self._settle(block)

    @property
    def occupancy(self) -> Occupancy:
        """How full it is."""
        return Occupancy(self._used, self._peak, self.capacity)

    def _allocate_reserved(self, key: Key, nbytes: int, place: _Place) -> int | None:
        if nbytes > place.nbytes:
            raise PoolError(f"{key} needs {nbytes:,} bytes; {place.nbytes:,} were reserved for it.")
        if place.is_free:
            offset: int | None = place.start
            place.block.take(place.start, nbytes)
            self._placed[place.start] = place.block
        else:
            offset = self._arena.allocate(nbytes)
        if offset is not None:
            del self._promised[key]
            self._settle(place.block)
        return offset

    def _settle(self, block: _Block) -> None:
        """Give a block back when nothing lies in it, and nothing will."""
        if not block.taken and not (block is self._block and self._promised):
            self._arena.free(block.base)
            if block is self._block:
                self._block = None


class _Block:
    """Room of one reservation.

    Attributes:
        base: where it begins.
        taken: start and end of every entry in it, sorted; no two overlap.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.taken: list[tuple[int, int]] = []

    def is_free(self, start: int, nbytes: int) -> bool:
        after = bisect_left(self.taken, (start,))
        return (after == 0 or self.taken[after - 1][1] <= start) and (
            after == len(self.taken) or start + nbytes <= self.taken[after][0]
        )

    def take(self, start: int, nbytes: int) -> None:
        insort(self.taken, (start, start + aligned(nbytes)))

    def free(self, start: int) -> int:
        _, end = self.taken.pop(bisect_left(self.taken, (start,)))
        return end - start


class _Place(NamedTuple):
    """Where a reserved entry will lie, if it is free by then."""

    block: _Block
    start: int
    nbytes: int

    @property
    def is_free(self) -> bool:
        return self.block.is_free(self.start, self.nbytes)
