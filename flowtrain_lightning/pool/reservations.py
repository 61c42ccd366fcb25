"""Room that is promised to entries before they exist, so that to put them in a fixed order can never block.

An owner puts its entries in one order and waits where there is no room for the next one. A reader may need a later
entry before it releases an earlier one: whoever needs entries 3 and 5 together gives back both only when the owner has
put entry 5. So two entries must lie apart if the release of the earlier may wait for the later one or for something
behind it; all others may share bytes, since the earlier is given back without the owner's doing.

Places are settled here, from the order alone, and not when an entry is put: no timing can then wear the room out into
pieces, and a reserved entry always finds its room.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain_lightning.pool.address import aligned
from flowtrain_lightning.pool.errors import PoolError


@dataclass(frozen=True)
class Reservation:
    """Room promised to an entry before it exists.

    Attributes:
        nbytes: room that it takes at most, see `entry_nbytes`.
        released_after: position of the last entry in the order that its readers may need before they release it;
            its own position or less where they release it without any later entry.
    """

    nbytes: int
    released_after: int


@dataclass(frozen=True)
class Places:
    """Where reserved entries lie.

    Attributes:
        offsets: of each entry, in the order, in bytes and aligned.
        capacity: bytes that they reach over, with which this order cannot block.
    """

    offsets: tuple[int, ...]
    capacity: int


def lay_out(order: Sequence[Reservation], capacity: int | None = None) -> Places:
    """Settle the places of all entries: for each the first gap that those leave which it must not touch.

    Where entries are of equal size, or are held in runs as encoder batches are, no other way needs less; to find the
    best one for any order is NP-hard.

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
        held = [other for other in held if other[2] >= position]
        room, start = aligned(reservation.nbytes), 0
        for other_start, other_end, _ in held:
            if other_start - start >= room:
                break
            start = other_end
        insort(held, (start, start + room, reservation.released_after))
        offsets.append(start)
        least = max(least, start + room)
    if capacity is not None and capacity < least:
        raise PoolError(
            f"{len(order)} entries can block each other with {capacity:,} bytes of room; with {least:,} they cannot. "
            "Raise `pool_bytes` by twice what is missing, or make the entries smaller."
        )
    return Places(tuple(offsets), least)
