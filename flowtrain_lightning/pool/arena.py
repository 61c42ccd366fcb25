"""Gives out and takes back room of any size within a stretch of bytes: best fit, neighbours joined when freed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from flowtrain_lightning.pool.address import ALIGNMENT, aligned


class Arena:
    """An allocator over the bytes ``start .. start + capacity``. It only counts; it touches no memory.

    Args:
        start: where the first byte lies, a multiple of the alignment.
        capacity: bytes; what lies beyond the last multiple of the alignment is never given out.

    Attributes:
        capacity: bytes that can be given out in all.
        used: bytes given out now.
    """

    def __init__(self, start: int, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._taken: dict[int, int] = {}  # offset -> bytes
        self._free: list[tuple[int, int]] = []  # (bytes, offset), sorted: the first that is large enough fits best
        self._free_at: dict[int, int] = {}  # offset -> bytes
        self._free_until: dict[int, int] = {}  # end -> offset
        if self.capacity:
            self._add_free(start, self.capacity)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest room that can be given out now."""
        return self._free[-1][0] if self._free else 0

    def allocate(self, nbytes: int) -> int | None:
        """Take room for ``nbytes`` (rounded up to the alignment).

        Returns:
            The offset of its first byte, or None when no free stretch is large enough now.
        """
        nbytes = aligned(max(nbytes, 1))
        found = bisect_left(self._free, (nbytes, 0))
        if found == len(self._free):
            return None
        available, offset = self._free.pop(found)
        del self._free_at[offset]
        if available > nbytes:
            self._add_free(offset + nbytes, available - nbytes)  # whose end is that of the whole stretch
        else:
            del self._free_until[offset + nbytes]
        self._taken[offset] = nbytes
        self.used += nbytes
        return offset

    def free(self, offset: int) -> int:
        """Give back the room that begins at ``offset``.

        Returns:
            How many bytes that are.

        Raises:
            KeyError: when no room that was given out begins there.
        """
        nbytes = self._taken.pop(offset)
        self.used -= nbytes
        end = offset + nbytes
        if end in self._free_at:
            after = self._free_at[end]
            self._remove_free(end, after)
            end += after
        if offset in self._free_until:
            before = self._free_until[offset]
            self._remove_free(before, offset - before)
            offset = before
        self._add_free(offset, end - offset)
        return nbytes

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether room for all of ``sizes`` could be taken now, in that order."""
        if len(sizes) == 1:
            return aligned(max(sizes[0], 1)) <= self.largest_free
        taken = []
        for nbytes in sizes:
            offset = self.allocate(nbytes)
            if offset is None:
                break
            taken.append(offset)
        for offset in taken:
            self.free(offset)
        return len(taken) == len(sizes)

    def _add_free(self, offset: int, nbytes: int) -> None:
        insort(self._free, (nbytes, offset))
        self._free_at[offset] = nbytes
        self._free_until[offset + nbytes] = offset

    def _remove_free(self, offset: int, nbytes: int) -> None:
        del self._free[bisect_left(self._free, (nbytes, offset))]
        del self._free_at[offset]
        del self._free_until[offset + nbytes]
