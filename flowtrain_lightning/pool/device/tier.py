"""The blocks of all ranks that can read each other's device memory, and the events that they share.

An owner keeps ``slots`` places for entries that live in its block at the same time. To each slot belong an event that
the owner records when the entry's bytes are there, and for each reader one that this reader records when its stream
has done with them. A slot is one entry's from its put until all its readers have given it back, and a reader issues
its wait before it gives back: so no event is recorded anew while somebody may still have to wait for what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowtrain_lightning.pool.device.runtime import DeviceBlock, DeviceEvent, DeviceRuntime

Events = Sequence[DeviceEvent]
"""One per slot."""


@dataclass(frozen=True)
class ReadableBlock:
    """A block whose entries this rank reads: that of a peer, or its own.

    Attributes:
        block: its memory.
        published: recorded by the owner when the entry in a slot is there.
        done: recorded by this rank when it has done with the entry in a slot.
    """

    block: DeviceBlock
    published: Events
    done: Events


@dataclass(frozen=True)
class DeviceTier:
    """One rank's connections. Made once for a run by `open_device_tier`, used by one pool after another.

    Attributes:
        rank: the calling rank.
        runtime: its device.
        nbytes: size of its own block; 0 where it has none.
        slots: how many entries can live in it at the same time.
        readable: rank -> its block, of all whose entries this rank can read, itself among them.
        readers: rank -> the events that it records when it has done with entries of the own block; only ranks that can
            read them, the own one among them.
        refusals: between which ranks entries go through host memory, and why.
        close: lets go of all blocks once every peer has done so too. Views of entries end here.
    """

    rank: int
    runtime: DeviceRuntime
    nbytes: int
    slots: int
    readable: Mapping[int, ReadableBlock]
    readers: Mapping[int, Events]
    refusals: tuple[str, ...]
    close: Callable[[], None]

    @property
    def sentence(self) -> str:
        """What this rank's entries use, for the log."""
        peers = sorted(self.readers.keys() - {self.rank})
        if not peers:
            used = "not used"
        else:
            used = f"{self.nbytes:,} bytes of {self.runtime.name}, read in place by ranks {', '.join(map(str, peers))}"
        return "; ".join([f"device memory of rank {self.rank}: {used}", *self.refusals])
