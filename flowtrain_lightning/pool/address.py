"""The 64-bit address of an entry, equal on every rank: who owns it, in which memory, where, and which one of several.

::

    bit 63        50 49     49 48            18 17            0
        owner (14)   tier (1)  offset / 64 (31) generation (18)

The bytes at an offset are used by one entry after another. The generation tells these entries apart, so that an address
which has been kept too long is an error and never another entry's bytes.
"""

from __future__ import annotations

from enum import IntEnum

ALIGNMENT = 64
"""Bytes. Entries, and the tensors within them, begin at multiples of it: a cache line, and the widest vector."""

OWNER_BITS, TIER_BITS, OFFSET_BITS, GENERATION_BITS = 14, 1, 31, 18
MAX_OWNERS = 1 << OWNER_BITS
MAX_SEGMENT_BYTES = ALIGNMENT << OFFSET_BITS
GENERATIONS = 1 << GENERATION_BITS

# What an address is made of. The fast path uses these numbers by themselves: to make an `Address` costs more than they.
OWNER_SHIFT = 64 - OWNER_BITS
DEVICE_BIT = 1 << OWNER_SHIFT - TIER_BITS
OFFSET_SHIFT = GENERATION_BITS - ALIGNMENT.bit_length() + 1  # of an offset in bytes, whose lowest bits are zero
OFFSET_MASK = MAX_SEGMENT_BYTES - ALIGNMENT


class Tier(IntEnum):
    """The memory of the owner that holds the tensors of an entry."""

    HOST = 0
    DEVICE = 1


class Address(int):
    """The address of an entry: a number below 2**64 with named parts."""

    __slots__ = ()

    @classmethod
    def of(cls, owner: int, tier: Tier, offset: int, generation: int) -> Address:
        """The address that is made of these parts.

        Args:
            owner: rank that owns the segment.
            tier: which of its memories holds the tensors.
            offset: bytes from the segment's start, a multiple of ``ALIGNMENT``.
            generation: which of the entries that lie there one after another.

        Raises:
            ValueError: when a part lies outside of its bits.
        """
        if (
            offset % ALIGNMENT
            or not 0 <= owner < MAX_OWNERS
            or not 0 <= offset < MAX_SEGMENT_BYTES
            or not 0 <= generation < GENERATIONS
        ):
            raise ValueError(
                f"Owner {owner}, offset {offset} and generation {generation} make no address: expected an owner below "
                f"{MAX_OWNERS}, an offset below {MAX_SEGMENT_BYTES} that is a multiple of {ALIGNMENT}, and a "
                f"generation below {GENERATIONS}."
            )
        return cls(owner << OWNER_SHIFT | tier * DEVICE_BIT | offset << OFFSET_SHIFT | generation)

    @property
    def owner(self) -> int:
        """The rank that owns the segment."""
        return self >> OWNER_SHIFT

    @property
    def tier(self) -> Tier:
        """The memory that holds the tensors."""
        return Tier.DEVICE if self & DEVICE_BIT else Tier.HOST

    @property
    def offset(self) -> int:
        """Bytes from the segment's start."""
        return self >> OFFSET_SHIFT & OFFSET_MASK

    @property
    def generation(self) -> int:
        """The number of the entry among those that lie there one after another."""
        return self & GENERATIONS - 1

    def __repr__(self) -> str:
        return f"Address(owner={self.owner}, tier={self.tier.name}, offset={self.offset}, generation={self.generation})"


def address_layout() -> str:
    """The bits of an address by part, from the highest on."""
    parts = (
        ("owner", OWNER_BITS),
        ("tier", TIER_BITS),
        (f"offset / {ALIGNMENT}", OFFSET_BITS),
        ("generation", GENERATION_BITS),
    )
    return ", ".join(f"{name} {bits} bit{'s' if bits > 1 else ''}" for name, bits in parts)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return nbytes + ALIGNMENT - 1 & -ALIGNMENT
