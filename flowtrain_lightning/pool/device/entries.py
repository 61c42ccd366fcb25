"""Which entries of a pool lie in device memory, and the order in which streams write, read and overwrite them.

Nothing here waits on the host. Three waits between streams keep every byte right::

    owner's current stream   the tensors are made
    owner's side stream      waits for that, copies them into the block, records "published"
    reader's current stream  waits for "published", uses the views, records "done" at the release
    owner's side stream      waits for "done" before it copies the next entry into that room

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

from flowtrain_lightning.pool.address import ALIGNMENT, Address, aligned
from flowtrain_lightning.pool.arena import Arena
from flowtrain_lightning.pool.counters import Occupancy
from flowtrain_lightning.pool.device.tier import DeviceTier
from flowtrain_lightning.pool.entry import Body, DeviceView, Memory, Outline, read_entry, write_header
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key


@dataclass(frozen=True)
class Placed:
    """An entry in the own block.

    Attributes:
        body: where it lies.
        nbytes: room that it takes.
        readers: who read it; their streams may still be at it when they have given it back.
        waiting: readers who have not given it back.
    """

    body: Body
    nbytes: int
    readers: tuple[int, ...]
    waiting: set[int]


class DeviceEntries:
    """The books of one pool over a tier, on one rank. Where an entry finds no place here it goes into host memory.

    Args:
        tier: used by no other pool as long as this one is open.
        memory: the own segment in host memory.
    """

    def __init__(self, tier: DeviceTier, memory: mmap) -> None:
        self._tier = tier
        self._runtime = tier.runtime
        self._produced = tier.runtime.make_event()
        self._arena = Arena(0, tier.nbytes)
        self._slots = deque(range(tier.slots))
        self._placed: dict[Address, Placed] = {}
        self._given_back: deque[Placed] = deque()  # by all readers; their streams may still be at it
        self._reading: dict[Address, int] = {}  # address of what this rank has leased -> slot
        self._used = self._peak = 0
        self._closed = False
        self._unpin = tier.runtime.pin(memory)
        # Whatever a former pool had in the block is void, and no stream is at it once all ranks have come here.
        tier.runtime.synchronize()

    def place(self, tensors: Sequence[Tensor], nbytes: int, readers: Collection[int]) -> Placed | None:
        """Take room in the own block for an entry of ``nbytes``, header included.

        Returns:
            Where it will lie; None when it belongs into host memory: not all of its tensors lie on this device, one of
            its readers cannot read the block, or the block is full.
        """
        runtime = self._runtime
        if not self._tier.readers.keys() >= set(readers) or not tensors or not all(map(runtime.holds, tensors)):
            return None
        while not self._slots or (offset := self._arena.allocate(nbytes)) is None:
            if not self._given_back:
                return None
            self._reuse(self._given_back.popleft())
        self._used += aligned(nbytes)
        self._peak = max(self._peak, self._used)
        return Placed(Body(offset, self._slots.popleft()), aligned(nbytes), tuple(readers), set(readers))

    def write(
        self, placed: Placed, memory: Memory, address: Address, key: Key, tensors: Sequence[Tensor], lines: Outline
    ) -> None:
        """Let the side stream copy ``tensors``, and write the header into host memory."""
        runtime, body, block = self._runtime, placed.body, self._tier.readable[self._tier.rank].block
        try:
            self._produced.record(runtime.current())
            self._produced.wait(runtime.side)
            for tensor, place in zip(tensors, lines.places, strict=True):
                if tensor.nbytes:
                    target = _view(block.memory, body.offset + place, tensor.dtype, tensor.shape)
                    runtime.copy(target, tensor.detach())
            self._tier.readable[self._tier.rank].published[body.slot].record(runtime.side)
            write_header(memory, address, key, lines, body)
        except BaseException:
            self._give_back(placed)
            raise
        self._placed[address] = placed

    def read(self, memory: Memory, start: int, nbytes: int, address: Address, key: Key) -> tuple[Tensor, ...]:
        """The tensors of an entry that was published to this rank, as views of its owner's block.

        Args:
            memory: holds the header.
            start: where in it.
            nbytes: room of the entry, as published.
            address: as published.
            key: as published.

        Raises:
            PoolError: when the entry is gone, its header damaged, or it lies outside of the block.
        """
        readable = self._tier.readable[address.owner]
        block = readable.block.memory

        def look(body: Body) -> DeviceView:
            if (
                body.offset % ALIGNMENT
                or body.offset + nbytes > len(block)
                or body.slot >= len(readable.published)
                or address in self._reading
            ):
                raise PoolError(f"{key} at {address} is said to lie at {body}, which cannot be in its owner's block.")
            readable.published[body.slot].wait(self._runtime.current())
            self._reading[address] = body.slot
            return lambda position, dtype, shape: _view(block, body.offset + position, dtype, shape)

        return read_entry(memory, start, nbytes, address, key, look)

    def done(self, address: Address) -> None:
        """This rank gives back an entry that it has read; its current stream is the one that has used it."""
        slot = self._reading.pop(address, None)
        if slot is not None and not self._closed:
            self._tier.readable[address.owner].done[slot].record(self._runtime.current())

    def given_back(self, address: Address, reader: int) -> None:
        """A reader has given back an entry of the own block.

        Nothing happens when it is none, or was given back by this reader before.
        """
        placed = self._placed.get(address)
        if placed is None or reader not in placed.waiting:
            return
        placed.waiting.remove(reader)
        if not placed.waiting:
            del self._placed[address]
            self._give_back(placed)

    def reads_from(self, owner: int) -> bool:
        """Whether this rank can read the block of ``owner``."""
        return owner in self._tier.readable

    @property
    def occupancy(self) -> Occupancy:
        """How full the own block is."""
        return Occupancy(self._used, self._peak, self._arena.capacity)

    def close(self) -> None:
        """Another pool may use the tier; leases of this one that are released later have no effect on it."""
        if not self._closed:
            self._closed = True
            self._unpin()

    def _give_back(self, placed: Placed) -> None:
        self._given_back.append(placed)
        self._used -= placed.nbytes

    def _reuse(self, placed: Placed) -> None:
        """Room and slot are free for what the side stream is given after this: it waits for the readers' streams."""
        for reader in placed.readers:
            self._tier.readers[reader][placed.body.slot].wait(self._runtime.side)
        self._arena.free(placed.body.offset)
        self._slots.append(placed.body.slot)


def _view(memory: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    # A tensor of its own over the same storage, no view: so autograd does not take a write to one for a write to all.
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    return empty.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), strides)
