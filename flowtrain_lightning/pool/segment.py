"""The segment of the pool that one rank owns and alone writes: shared memory, split into two parts."""

from __future__ import annotations

import mmap
import os

from flowtrain_lightning.pool.address import GENERATIONS, MAX_SEGMENT_BYTES, Address, Tier, aligned
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key
from flowtrain_lightning.pool.memory import create_memory, first_byte_of, map_memory
from flowtrain_lightning.pool.part import Part


class Segment:
    """The owner's view of its segment in host memory.

    Args:
        rank: the owner.
        current_bytes: room for entries of the step that runs.
        ahead_bytes: room for entries of later steps. It is apart, so that work ahead can never take the room that
            the step which runs is waiting for.

    Attributes:
        current: room for the step that runs.
        ahead: room for later steps.
        nbytes: bytes of the whole segment.
        memory: the mapped bytes.
        first_byte: where this process has them.

    Raises:
        PoolError: when there is not enough memory, or an address could not reach all of it.
    """

    def __init__(self, rank: int, current_bytes: int, ahead_bytes: int) -> None:
        self.rank = rank
        self.current = Part(0, current_bytes)
        self.ahead = Part(self.current.capacity, ahead_bytes)
        self.nbytes = max(-(-aligned(current_bytes + ahead_bytes) // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if self.nbytes > MAX_SEGMENT_BYTES:
            raise PoolError(
                f"A segment of {self.nbytes:,} bytes was asked for; an address reaches {MAX_SEGMENT_BYTES:,}. "
                "Lower `pool_bytes`."
            )
        self.descriptor = create_memory(f"flowtrain segment of rank {rank}", self.nbytes)
        self.memory = map_memory(self.descriptor, self.nbytes)
        self.first_byte = first_byte_of(self.memory)
        self._first = Address.of(rank, Tier.HOST, 0, 0)
        self._generation = 0
        self._live: dict[int, int] = {}  # offset -> address

    def part(self, ahead: bool) -> Part:
        """The part of later steps, or that of the step which runs."""
        return self.ahead if ahead else self.current

    def allocate(self, key: Key, nbytes: int, ahead: bool) -> Address | None:
        """Take room for an entry, under an address of its own; None when there is none now."""
        offset = self.part(ahead).allocate(key, nbytes)
        if offset is None:
            return None
        self._generation = (self._generation + 1) % GENERATIONS
        address = self._first.at(offset, self._generation)
        self._live[offset] = address
        return address

    def in_device_memory(self, address: Address) -> Address:
        """The address of the same room when only the header of its entry lies there, its tensors in device memory.

        The rest is kept free for it, so that an order which is safe in host memory is safe wherever its entries lie.
        """
        moved = Address.of(self.rank, Tier.DEVICE, address.offset, address.generation)
        self._live[address.offset] = moved
        return moved

    def free(self, address: Address) -> None:
        """Give room back.

        Raises:
            PoolError: when the address is not, or no longer, that of room which was taken.
        """
        offset = address.offset
        if self._live.get(offset) != address:
            raise PoolError(f"{address} is stale: this place was freed, or given to another entry, since.")
        del self._live[offset]
        self.part(ahead=offset >= self.current.capacity).free(offset)

    def close(self) -> None:
        """Drop the memory; the system takes it back when no process and no tensor uses it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)  # the mapping stays for views that are still in use, and ends with the last
            self.descriptor = -1
