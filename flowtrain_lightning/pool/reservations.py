"""Where reserved entries lie, so that putting them in a fixed order can never block, whatever the timing.

An owner puts its entries in one order and waits where the place of the next one is still taken. A reader may need a
later entry before it releases an earlier one: whoever needs entries 3 and 5 together gives back both only when the
owner has put entry 5. So two entries must lie apart if the release of the earlier may wait for the later one or for
something behind it; all others may share bytes, since the earlier is given back without the owner's doing.

Places are settled here, from the order alone, and not when an entry is put: no timing can then wear the room out into
pieces, and a reserved entry always finds its room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowtrain_lightning.pool.address import aligned
from flowtrain_lightning.pool.errors import PoolError


@dataclass(frozen=True)
class Reservation:
    """Room promised to an entry before it exists.

    Attributes:
        nbytes: room that it takes, see `entry_room`.
        released_after: position of the last entry in the order that its readers may need before they release it;
            its own position or less where they release it without any later entry.
    """

    nbytes: int
    released_after: int


@dataclass(frozen=True)
class Reserved:
    """Where reserved entries lie.

    Attributes:
        offsets: of each entry, in the order, in bytes and aligned.
        capacity: bytes that they reach over: the least with which this order cannot block.
    """

    offsets: tuple[int, ...]
    capacity: int


def reserve(order: Sequence[Reservation], capacity: int | None = None) -> Reserved:
    """Settle the places of all entries.

    It takes the better of two greedy layouts; to find the best of all is NP-hard. Where entries are of equal size, or
    are held in runs as encoder batches are, the greedy one is the best.

    Args:
        order: in which the owner puts the entries.
        capacity: bytes that there are; None asks for the least only.

    Raises:
        PoolError: when the order could block with that capacity; the text says how much would do.
    """
    rooms = [aligned(reservation.nbytes) for reservation in order]
    by_position = range(len(order))
    by_size = sorted(by_position, key=lambda place: -rooms[place])
    layout = min((_lay_out(order, rooms, places) for places in (by_position, by_size)), key=lambda one: one.capacity)
    if capacity is not None and capacity < layout.capacity:
        raise PoolError(
            f"{len(order)} entries can block each other with {capacity:,} bytes of room; with {layout.capacity:,} they "
            "cannot. Raise `pool_bytes` by what is missing, or make the entries smaller."
        )
    return layout


def least_held(order: Sequence[Reservation]) -> int:
    """Bytes that must be held at one moment under the worst timing: no layout needs less."""
    rooms = [aligned(reservation.nbytes) for reservation in order]
    return max((sum(rooms[held] for held in _held_with(order, place)) for place in range(len(order))), default=0)


def _held_with(order: Sequence[Reservation], place: int) -> list[int]:
    """The entry at ``place``, and those before it that may be held until it was put."""
    return [earlier for earlier in range(place) if order[earlier].released_after >= place] + [place]


def _lay_out(order: Sequence[Reservation], rooms: Sequence[int], places: Iterable[int]) -> Reserved:
    """Give each entry, in the order of ``places``, the first gap that those which it must not touch leave."""
    offsets: dict[int, int] = {}
    for place in places:
        end = 0
        for start, other in sorted(
            (offsets[other], other) for other in offsets if _must_lie_apart(order, place, other)
        ):
            if start - end >= rooms[place]:
                break
            end = max(end, start + rooms[other])
        offsets[place] = end
    capacity = max((offsets[place] + rooms[place] for place in offsets), default=0)
    return Reserved(tuple(offsets[place] for place in range(len(order))), capacity)


def _must_lie_apart(order: Sequence[Reservation], one: int, other: int) -> bool:
    return order[min(one, other)].released_after >= max(one, other)
