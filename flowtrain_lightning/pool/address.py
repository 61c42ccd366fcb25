"""The 64-bit address of an entry: who owns it, in which tier, where, and which use of that place.

::

    bit 63        50 49     49 48            18 17            0
        owner (14)   tier (1)  offset / 64 (31) generation (18)

A place in a segment is used again and again. The generation tells these uses apart, so that an address which has
been kept too long is an error and never another entry's bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

ALIGNMENT = 64
"""Bytes. Entries, and the tensors within them, begin at multiples of it: a cache line, and the widest vector."""

_OWNER_BITS, _TIER_BITS, _OFFSET_BITS, _GENERATION_BITS = 14, 1, 31, 18
MAX_OWNERS = 1 << _OWNER_BITS
MAX_SEGMENT_BYTES = ALIGNMENT << _OFFSET_BITS
GENERATIONS = 1 << _GENERATION_BITS


class Tier(IntEnum):
    """Which memory of the owner holds an entry."""

    HOST = 0
    DEVICE = 1


class Address(NamedTuple):
    """Where an entry lies. Equal numbers on every rank.

    Attributes:
        owner: rank that owns the segment.
        tier: the memory that the segment is made of.
        offset: bytes from the segment's start, a multiple of ``ALIGNMENT``.
        generation: which use of this place, counted within the segment.
    """

    owner: int
    tier: Tier
    offset: int
    generation: int

    def pack(self) -> int:
        """The address as one number of 64 bits.

        Raises:
            ValueError: when a part lies outside of its bits.
        """
        owner, tier, offset, generation = self
        places, remainder = divmod(offset, ALIGNMENT)
        if (
            remainder
            or not 0 <= owner < MAX_OWNERS
            or not 0 <= places < 1 << _OFFSET_BITS
            or not 0 <= generation < GENERATIONS
        ):
            raise ValueError(
                f"{self} is no address: expected an owner below {MAX_OWNERS}, an offset below {MAX_SEGMENT_BYTES} "
                f"that is a multiple of {ALIGNMENT}, and a generation below {GENERATIONS}."
            )
        return (((owner << _TIER_BITS | tier) << _OFFSET_BITS | places) << _GENERATION_BITS) | generation

    @classmethod
    def unpack(cls, number: int) -> Address:
        """The address behind a number made by ``pack``.

        Raises:
            ValueError: when ``number`` does not fit 64 bits.
        """
        if not 0 <= number < 1 << 64:
            raise ValueError(f"{number} is no address: expected a number of 64 bits.")
        rest, generation = number >> _GENERATION_BITS, number & (GENERATIONS - 1)
        rest, places = rest >> _OFFSET_BITS, rest & ((1 << _OFFSET_BITS) - 1)
        owner, tier = rest >> _TIER_BITS, rest & ((1 << _TIER_BITS) - 1)
        return cls(owner, Tier(tier), places * ALIGNMENT, generation)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
