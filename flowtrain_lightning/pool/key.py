"""The name of an entry: who uses the pool chooses it, and records and headers carry it as a number."""

from __future__ import annotations

from typing import NamedTuple

from flowtrain_lightning.pool.errors import PoolError

INDEX_BITS, ITEM_BITS, PART_BITS = 32, 24, 8

_INDEX_SHIFT = ITEM_BITS + PART_BITS
_INDICES, _ITEMS, _PARTS = 1 << INDEX_BITS, 1 << ITEM_BITS, 1 << PART_BITS
_new = tuple.__new__  # half the time of a call of the class, once per record that arrives


class Key(NamedTuple):
    """The name of an entry, given by those who use the pool and never given twice.

    Attributes:
        channel: 0 .. 255, what kind of entry it is.
        index: 0 .. 2**32 - 1, never falls within a channel: for example the step.
        item: 0 .. 2**24 - 1, which of its kind and index.
        part: 0 .. 255, which part of it, where several ranks put one each: readers of one entry, say, of which each
            gives back the gradients of the rows that it has used.
    """

    channel: int
    index: int  # type: ignore[assignment]  # the name hides a tuple's method, which no one needs of a key
    item: int
    part: int = 0

    def pack(self) -> int:
        """Index, item and part as one number of 64 bits; the channel stands beside it.

        Raises:
            PoolError: when one of them lies outside of its bits.
        """
        channel, index, item, part = self
        if not (0 <= channel < 256 and 0 <= index < _INDICES and 0 <= item < _ITEMS and 0 <= part < _PARTS):
            raise PoolError(
                f"{self} is no key: expected channel < 256, index < 2**{INDEX_BITS}, item < 2**{ITEM_BITS}, "
                f"part < {_PARTS}, none negative."
            )
        return index << _INDEX_SHIFT | item << PART_BITS | part

    @classmethod
    def unpack(cls, channel: int, number: int) -> Key:
        """The key behind a channel and a number made by ``pack``."""
        item = number >> PART_BITS & _ITEMS - 1
        return _new(cls, (channel, number >> _INDEX_SHIFT, item, number & _PARTS - 1))
