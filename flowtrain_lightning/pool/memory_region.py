"""Keeps account of a region's bytes: taken, free, or reserved for entries that do not exist yet.

An owner puts its entries in one order and waits where the next one does not fit. A reader may need a later
entry before it releases an earlier one: whoever needs entries 3 and 5 together gives back both only when the owner has
put entry 5. So two entries must lie apart if the release of the earlier may wait for the later one or for something
behind it; all others may share bytes, since the earlier is given back without the owner's doing.

Offsets are assigned from the order alone, not when an entry is put: no timing can then break free memory into pieces
that are too small, and a reserved entry always finds its bytes.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain_lightning.pool.address import ALIGNMENT
from flowtrain_lightning.pool.counters import Occupancy
from flowtrain_lightning.pool.entry import Key
from flowtrain_lightning.pool.pool_errors import PoolError


@dataclass(frozen=True)
class Reservation:
    """Bytes promised to an entry before it exists.

    Attributes:
        nbytes: size of the entry at most, see `entry_nbytes`.
        released_after: position of the last entry in the order that its readers may need before they release it;
            its own position or less where they release it without any later entry.
    """

    nbytes: int
    released_after: int


@dataclass(frozen=True)
class AssignedOffsets:
    """The places of reserved entries.

    Attributes:
        offsets: of each entry, in the order, in bytes and aligned.
        capacity: bytes that they reach over, with which this order cannot block.
    """

    offsets: tuple[int, ...]
    capacity: int


def assign_offsets(order: Sequence[Reservation], capacity: int | None = None) -> AssignedOffsets:
    """Places each entry in the first gap between those before it that may still be held by then.

    Where entries are of equal size, or are held in runs as encoder batches are, no other assignment needs fewer bytes;
    to find the best one for any order is NP-hard.

    Args:
        order: in which the owner puts the entries.
        capacity: bytes that there are; None asks for the least only.

    Raises:
        PoolError: when the order could block with that capacity; the text says how much would do.
    """
    offsets: list[int] = []
    least = 0
    held: list[tuple[int, int, int]] = []  # start, end, released_after: of what may still be held
    for position, reservation in enumerate(order):
        still_held: list[tuple[int, int, int]] = []
        for other in held:
            if other[2] >= position:
                still_held.append(other)
        held = still_held
        nbytes, start = reservation.nbytes + ALIGNMENT - 1 & -ALIGNMENT, 0
        for other_start, other_end, _ in held:
            if other_start - start >= nbytes:
                break
            start = other_end
        insort(held, (start, start + nbytes, reservation.released_after))
        offsets.append(start)
        least = max(least, start + nbytes)
    if capacity is not None and capacity < least:
        raise PoolError(
            f"{len(order)} entries can block each other with {capacity:,} bytes; with {least:,} they cannot. "
            "Raise `PoolSettings(bytes=...)` by twice what is missing, or make the entries smaller."
        )
    return AssignedOffsets(tuple(offsets), least)


class FreeList:
    """The free stretches of a range of bytes, in order. It only counts; it touches no memory.

    Attributes:
        start: first byte of the range, a multiple of the alignment.
        nbytes: bytes that can be given out in all: the size of the range, rounded down to the alignment.
        taken: first byte of what was given out -> its size.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.taken: dict[int, int] = {}
        self._free = [(start, start + self.nbytes)] if self.nbytes else []  # start and end of each, none adjacent

    @property
    def largest(self) -> int:
        """Size of the largest free stretch."""
        return max((end - start for start, end in self._free), default=0)

    def take(self, nbytes: int) -> int | None:
        """Take bytes from the smallest stretch that has as many.

        Args:
            nbytes: how many; they are rounded up to the alignment.

        Returns:
            The first of them, or None where no stretch is large enough now.
        """
        nbytes = max(nbytes, 1) + ALIGNMENT - 1 & -ALIGNMENT
        best, smallest = -1, sys.maxsize
        for index, (start, end) in enumerate(self._free):
            if nbytes <= end - start < smallest:
                best, smallest = index, end - start
        if best < 0:
            return None
        start, end = self._free[best]
        self._free[best : best + 1] = [(start + nbytes, end)] if nbytes < smallest else []
        self.taken[start] = nbytes
        return start

    def take_at(self, start: int, nbytes: int) -> bool:
        """Take just these bytes, rounded up to the alignment; False where not all of them are free."""
        index, end = bisect_left(self._free, (start + 1,)) - 1, start + (nbytes + ALIGNMENT - 1 & -ALIGNMENT)
        if index < 0 or self._free[index][1] < end:
            return False
        free_start, free_end = self._free[index]
        left = [(free_start, start)] if free_start < start else []
        right = [(end, free_end)] if end < free_end else []
        self._free[index : index + 1] = left + right
        self.taken[start] = end - start
        return True

    def is_free(self, start: int, nbytes: int) -> bool:
        """Whether all of these bytes are free."""
        index = bisect_left(self._free, (start + 1,)) - 1
        return index >= 0 and start + nbytes <= self._free[index][1]

    def give_back(self, start: int) -> int:
        """Take back what begins at ``start``, and join it with the free stretches beside it.

        Returns:
            How many bytes that are.

        Raises:
            KeyError: when nothing that was given out begins there.
        """
        nbytes = self.taken.pop(start)
        free, end = self._free, start + nbytes
        after = bisect_left(free, (start,))
        if after < len(free) and free[after][0] == end:
            end = free.pop(after)[1]
        if after and free[after - 1][1] == start:
            after -= 1
            start = free.pop(after)[0]
        free.insert(after, (start, end))
        return nbytes

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether bytes of all these sizes could be taken now, in that order."""
        if len(sizes) == 1:
            return sizes[0] <= self.largest
        taken = []
        for nbytes in sizes:
            start = self.take(nbytes)
            if start is None:
                break
            taken.append(start)
        for start in taken:
            self.give_back(start)
        return len(taken) == len(sizes)


_NOT_RESERVED: tuple[FreeList | None, int, int] = None, 0, 0


class MemoryRegion:
    """One of the two regions of a segment. It gives bytes to entries, and reserves a block of bytes for an order.

    A reserved entry goes to the offset that was assigned to it or, while other entries lie there, anywhere else where
    it fits. So it waits no longer than until those before it that lie there are released.

    Args:
        start: the region's first byte, a multiple of the alignment.
        capacity: its size in bytes.

    Attributes:
        capacity: bytes that can be given out in all.
    """

    def __init__(self, start: int, capacity: int) -> None:
        self._free = FreeList(start, capacity)
        self.capacity = self._free.nbytes
        self._used = self._peak = 0  # bytes of entries
        self._block: FreeList | None = None  # of the latest reservation
        self._reserved: dict[Key, tuple[FreeList, int, int]] = {}  # not put yet -> block, offset and bytes
        self._block_of: dict[int, FreeList] = {}  # offset of an entry that lies where it was assigned -> that block

    def reserve(self, *orders: Mapping[Key, Reservation]) -> bool:
        """Promise bytes to these entries. The former promise ends.

        Args:
            orders: entries in the order in which they will be put; those of one order lie apart from those of another.

        Returns:
            Whether there was memory to promise. If not, releases make some; ask again.

        Raises:
            PoolError: when there never will be.
        """
        left, of_orders = self.capacity, []
        for order in orders:
            of_orders.append(assign_offsets(list(order.values()), left))
            left -= of_orders[-1].capacity
        self._reserved.clear()
        if self._block is not None:
            self._end_block(self._block)
        if not any(orders):
            return True
        start = self._free.take(self.capacity - left)
        if start is None:
            return False
        block = self._block = FreeList(start, self.capacity - left)
        for order, assigned in zip(orders, of_orders, strict=True):
            for (key, reservation), offset in zip(order.items(), assigned.offsets, strict=True):
                self._reserved[key] = block, start + offset, reservation.nbytes + ALIGNMENT - 1 & -ALIGNMENT
            start += assigned.capacity
        return True

    def has_room(self, keys: Sequence[Key]) -> bool:
        """Whether these reserved entries could all be put now, in the order of the reservation.

        Raises:
            PoolError: when one of them was not reserved, or was put already.
        """
        elsewhere = []
        for key in keys:
            if key not in self._reserved:
                raise PoolError(f"Nothing is reserved for {key}. Reserve its bytes before, and ask before it is put.")
            block, offset, nbytes = self._reserved[key]
            if not block.is_free(offset, nbytes):
                elsewhere.append(nbytes)
        return not elsewhere or self._free.fits(elsewhere)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether entries of these sizes, which are not reserved, could be put now, in that order."""
        return self._free.fits(sizes)

    def allocate(self, key: Key, nbytes: int) -> int | None:
        """Take bytes for an entry.

        Returns:
            The offset of the first one, or None where there are not as many now.

        Raises:
            PoolError: when fewer were reserved for it.
        """
        block, offset, most = self._reserved.get(key, _NOT_RESERVED)
        if block is not None and nbytes > most:
            raise PoolError(f"{key} needs {nbytes:,} bytes; {most:,} were reserved for it.")
        if block is not None and block.take_at(offset, nbytes):
            self._block_of[offset] = block
        else:
            found = self._free.take(nbytes)
            if found is None:
                return None
            offset = found
        if block is not None:
            del self._reserved[key]
            if not self._reserved:
                self._end_block(block)
        self._used += nbytes + ALIGNMENT - 1 & -ALIGNMENT
        self._peak = max(self._peak, self._used)
        return offset

    def free(self, offset: int) -> None:
        """Take back the bytes of the entry at ``offset``.

        Raises:
            KeyError: when no entry begins there.
        """
        block = self._block_of.pop(offset, None)
        if block is None:
            self._used -= self._free.give_back(offset)
        else:
            self._used -= block.give_back(offset)
            if not block.taken:
                self._end_block(block)

    @property
    def occupancy(self) -> Occupancy:
        """Its occupancy."""
        return Occupancy(self._used, self._peak, self.capacity)

    def _end_block(self, block: FreeList) -> None:
        """Give a block back when no entry lies in it, and none will."""
        if not block.taken and not (block is self._block and self._reserved):
            self._free.give_back(block.start)
            if block is self._block:
                self._block = None
