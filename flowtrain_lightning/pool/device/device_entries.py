"""The entries of a pool in device memory, and the order in which streams write, read and overwrite them.

Nothing here waits on the host. Three waits between streams keep every byte right::

    owner's current stream   the tensors are made
    owner's side stream      waits for that, copies them into the block, records "published"
    reader's current stream  waits for "published", uses the views, records "done" at the release
    owner's side stream      waits for "done" before it copies the next entry there

None of them can block for ever: each is for a mark that was set before the wait was issued, so whatever a stream waits
for was given to a device earlier than what waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

from flowtrain_lightning.pool.address import ALIGNMENT, DEVICE_BIT, Address
from flowtrain_lightning.pool.control_records import ControlRecord
from flowtrain_lightning.pool.counters import Occupancy
from flowtrain_lightning.pool.device.device_tier import DeviceTier
from flowtrain_lightning.pool.entry import DeviceLocation, EntryLayout, Memory, read_header, write_header
from flowtrain_lightning.pool.memory_region import FreeList
from flowtrain_lightning.pool.pool_errors import PoolError


@dataclass(frozen=True)
class StoredEntry:
    """An entry in the own block.

    Attributes:
        location: where it lies.
        nbytes: its size.
        readers: who read it; their streams may still be at it when they have given it back.
        waiting: readers who have not given it back.
    """

    location: DeviceLocation
    nbytes: int
    readers: tuple[int, ...]
    waiting: set[int]


class DeviceEntries:
    """The books of one pool over a tier, on one rank. An entry that does not fit here goes into host memory.

    Attributes:
        fallbacks: how many did, though their tensors lie on the device.

    Args:
        tier: used by no other pool as long as this one is open.
        memory: the own segment in host memory.
    """

    def __init__(self, tier: DeviceTier, memory: mmap) -> None:
        self._tier = tier
        self._runtime = tier.runtime
        self._memory = memory
        self._produced = tier.runtime.make_mark()
        self._free = FreeList(0, tier.nbytes)
        self._slots = deque(range(tier.slots))
        self._stored: dict[int, StoredEntry] = {}  # by address
        self._given_back: deque[StoredEntry] = deque()  # by all readers; their streams may still be at it
        self._reading: dict[int, int] = {}  # address of what this rank has leased -> slot
        self._used = self._peak = 0
        self._closed = False
        self.fallbacks = 0
        # Whatever a former pool had in the block is void, and no stream is at it once all ranks have come here.
        tier.runtime.synchronize()

    def put(
        self,
        record: ControlRecord,
        start: int,
        tensors: Sequence[Tensor],
        layout: EntryLayout,
        readers: Collection[int],
    ) -> ControlRecord | None:
        """Let the side stream copy ``tensors`` into the own block, and write their header into host memory.

        Args:
            record: publishes the entry at its address in host memory.
            start: where that is in the own segment.
            tensors: of the entry.
            layout: of these tensors.
            readers: of the entry.

        Returns:
            The record that publishes it in device memory; None when it belongs into host memory: not all of its tensors
            lie on this device, one of its readers cannot read the block, or the block is full.
        """
        if not tensors or not all(map(self._runtime.holds, tensors)):
            return None
        location = self._allocate(record.size) if self._tier.readers.keys() >= set(readers) else None
        if location is None:
            self.fallbacks += 1
            return None
        stored = StoredEntry(location, record.size, tuple(readers), set(readers))
        published = record._replace(address=record.address | DEVICE_BIT)
        try:
            self._copy(tensors, layout, location)
            write_header(self._memory, start, published, layout, location)
        except BaseException:
            self._give_back(stored)
            raise
        self._stored[published.address] = stored
        return published

    def read(self, memory: Memory, start: int, published: ControlRecord) -> tuple[Tensor, ...]:
        """The tensors of an entry that was published to this rank, as views of its owner's block.

        Args:
            memory: holds the header.
            start: where in it.
            published: the record that published the entry.

        Raises:
            PoolError: when the entry is gone, its header damaged, or it lies outside of the block.
        """
        tensors, *found = read_header(memory, start, published)
        location = DeviceLocation(*found)
        readable, address = self._tier.readable[published.sender], published.address
        block = readable.block.memory
        if (
            location.offset % ALIGNMENT
            or location.offset + published.size > len(block)
            or location.slot >= len(readable.published)
            or address in self._reading
        ):
            raise PoolError(f"{Address(address)!r} is said to lie at {location}, which cannot be in its owner's block.")
        readable.published[location.slot].wait(self._runtime.current())
        self._reading[address] = location.slot
        return tuple(_view(block, location.offset + offset, dtype, shape) for offset, dtype, shape, _ in tensors)

    def done(self, address: int) -> None:
        """This rank gives back an entry that it has read; its current stream is the one that has used it."""
        slot = self._reading.pop(address, None)
        if slot is not None and not self._closed:
            owner = Address(address).owner
            self._tier.readable[owner].done[slot].record(self._runtime.current())

    def given_back(self, address: int, reader: int) -> None:
        """A reader has given back an entry of the own block.

        Nothing happens when it is none, or was given back by this reader before.
        """
        stored = self._stored.get(address)
        if stored is None or reader not in stored.waiting:
            return
        stored.waiting.remove(reader)
        if not stored.waiting:
            del self._stored[address]
            self._give_back(stored)

    def reads_from(self, owner: int) -> bool:
        """Whether this rank can read the block of ``owner``."""
        return owner in self._tier.readable

    def serves_both_ways(self, rank: int) -> bool:
        """Whether this rank and another one can read each other's blocks."""
        return rank in self._tier.readable and rank in self._tier.readers

    @property
    def occupancy(self) -> Occupancy:
        """The occupancy of the own block."""
        return Occupancy(self._used, self._peak, self._free.nbytes)

    def close(self) -> None:
        """Another pool may use the tier; leases of this one that are released later have no effect on it."""
        self._closed = True

    def _allocate(self, nbytes: int) -> DeviceLocation | None:
        """Bytes and a slot in the own block, those of entries that all readers have given back among them."""
        while not self._slots or (offset := self._free.take(nbytes)) is None:
            if not self._given_back:
                return None
            self._reuse(self._given_back.popleft())
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        return DeviceLocation(offset, self._slots.popleft())

    def _copy(self, tensors: Sequence[Tensor], layout: EntryLayout, location: DeviceLocation) -> None:
        runtime, own = self._runtime, self._tier.readable[self._tier.rank]
        self._produced.record(runtime.current())
        self._produced.wait(runtime.side)
        for tensor, offset in zip(tensors, layout.offsets, strict=True):
            if tensor.nbytes:
                target = _view(own.block.memory, location.offset + offset, tensor.dtype, tensor.shape)
                runtime.copy(target, tensor.detach())
        own.published[location.slot].record(runtime.side)

    def _give_back(self, stored: StoredEntry) -> None:
        self._given_back.append(stored)
        self._used -= stored.nbytes

    def _reuse(self, stored: StoredEntry) -> None:
        """Bytes and slot are free for what the side stream is given after this: it waits for the readers' streams."""
        for reader in stored.readers:
            self._tier.readers[reader][stored.location.slot].wait(self._runtime.side)
        self._free.give_back(stored.location.offset)
        self._slots.append(stored.location.slot)


def _view(memory: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    # A tensor of its own over the same storage, no view: so autograd does not take a write to one for a write to all.
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    return empty.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), strides)
