"""The 64-bit address of an entry: who owns it, in which tier, where, and which use of that place.

::

    bit 63        50 49     49 48            18 17            0
        owner (14)   tier (1)  offset / 64 (31) generation (18)

A place in a segment is used again and again. The generation tells these uses apart, so that an address which has
been kept too long is an error and never another entry's bytes.
"""

from __future__ import annotations

from enum import IntEnum

ALIGNMENT = 64
"""Bytes. Entries, and the tensors within them, begin at multiples of it: a cache line, and the widest vector."""

OWNER_BITS, TIER_BITS, OFFSET_BITS, GENERATION_BITS = 14, 1, 31, 18
MAX_OWNERS = 1 << OWNER_BITS
MAX_SEGMENT_BYTES = ALIGNMENT << OFFSET_BITS
GENERATIONS = 1 << GENERATION_BITS

_OWNER_SHIFT = 64 - OWNER_BITS
_TIER_SHIFT = _OWNER_SHIFT - TIER_BITS
_MAX_OFFSET_PLACE = (1 << OFFSET_BITS) - 1
_OFFSET_SHIFT = GENERATION_BITS - ALIGNMENT.bit_length() + 1  # of an offset in bytes, whose lowest bits are zero


class Tier(IntEnum):
    """Which memory of the owner holds an entry."""

    HOST = 0
    DEVICE = 1


_TIERS = (Tier.HOST, Tier.DEVICE)


class Address(int):
    """Where an entry lies: a number below 2**64 with named parts. Equal on every rank."""

    __slots__ = ()

    @classmethod
    def of(cls, owner: int, tier: Tier, offset: int, generation: int) -> Address:
        """The address that is made of these parts.

        Args:
            owner: rank that owns the segment.
            tier: the memory that the segment is made of.
            offset: bytes from the segment's start, a multiple of ``ALIGNMENT``.
            generation: which use of this place, counted within the segment.

        Raises:
            ValueError: when a part lies outside of its bits.
        """
        place, remainder = divmod(offset, ALIGNMENT)
        if (
            remainder
            or not 0 <= owner < MAX_OWNERS
            or not 0 <= place <= _MAX_OFFSET_PLACE
            or not 0 <= generation < GENERATIONS
        ):
            raise ValueError(
                f"Owner {owner}, offset {offset} and generation {generation} make no address: expected an owner below "
                f"{MAX_OWNERS}, an offset below {MAX_SEGMENT_BYTES} that is a multiple of {ALIGNMENT}, and a "
                f"generation below {GENERATIONS}."
            )
        return cls(owner << _OWNER_SHIFT | tier << _TIER_SHIFT | place << GENERATION_BITS | generation)

    def at(self, offset: int, generation: int) -> Address:
        """Another place and use of the segment whose first address this is. Both are taken to lie within their bits."""
        return Address(self | offset << _OFFSET_SHIFT | generation)

    @property
    def owner(self) -> int:
        """The rank that owns the segment."""
        return self >> _OWNER_SHIFT

    @property
    def tier(self) -> Tier:
        """The memory that the segment is made of."""
        return _TIERS[self >> _TIER_SHIFT & 1]

    @property
    def offset(self) -> int:
        """Bytes from the segment's start."""
        return (self >> GENERATION_BITS & _MAX_OFFSET_PLACE) * ALIGNMENT

    @property
    def generation(self) -> int:
        """Which use of this place it is."""
        return self & (GENERATIONS - 1)

    def __repr__(self) -> str:
        return f"Address(owner={self.owner}, tier={self.tier.name}, offset={self.offset}, generation={self.generation})"


def address_layout() -> str:
    """Which bits of an address are which part, from the highest on."""
    parts = (
        ("owner", OWNER_BITS),
        ("tier", TIER_BITS),
        (f"offset / {ALIGNMENT}", OFFSET_BITS),
        ("generation", GENERATION_BITS),
    )
    return ", ".join(f"{name} {bits} bit{'s' if bits > 1 else ''}" for name, bits in parts)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT
