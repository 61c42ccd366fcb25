"""The device tier: blocks of device memory that ranks of a host read in place, and what it needs of a device.

An owner keeps ``slots`` entries at most in its block at a time. To each slot belong an event that the owner records
when the entry's bytes are there, and for each reader one that this reader records when its stream has done with them.
A slot belongs to one entry from its put until all its readers have given it back, and a reader issues its wait before
it gives back: so no event is recorded anew while somebody may still have to wait for what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Protocol

from torch import Tensor

HANDLE_BYTES = 64
"""Size of what names a block or an event to another process."""


class DeviceEvent(Protocol):
    """A mark in a stream, as ``torch.cuda.Event``. A wait is for the latest mark that was set when it was issued."""

    def record(self, stream: Any) -> None:
        """Set the mark behind all that ``stream`` was given so far."""

    def wait(self, stream: Any) -> None:
        """Let all that ``stream`` is given from now on come after the mark. The calling thread goes on at once."""

    def query(self) -> bool:
        """Whether its stream has come to the latest mark."""

    def ipc_handle(self) -> bytes:
        """Its name for other processes, of ``HANDLE_BYTES``."""


@dataclass(frozen=True)
class DeviceBlock:
    """One allocation in device memory, of this process or opened from another one.

    Attributes:
        memory: all of it, ``(bytes,)``, uint8.
        handle: its name for other processes.
        close: frees it, or ends its mapping. Nobody may use it any more then.
    """

    memory: Tensor
    handle: bytes
    close: Callable[[], None]


class DeviceRuntime(Protocol):
    """One rank's device. Every method may raise ``RuntimeError`` with the device's own reason."""

    name: str
    """For messages."""

    side: Any
    """The stream of the pool's own copies."""

    def current(self) -> Any:
        """The stream to which the calling thread gives its work now."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this device's memory, in a form that can be copied as it is."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in device memory."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in device memory, once the current stream has come to it. Waits for that."""

    def allocate(self, nbytes: int) -> DeviceBlock:
        """Make a block that others can open."""

    def open_block(self, handle: bytes, nbytes: int) -> DeviceBlock:
        """Map the block of another process, on this device or another one, so that this device reaches it."""

    def make_room(self) -> None:
        """Give back memory that this process keeps for later, so that `allocate` may find it."""

    def make_mark(self) -> DeviceEvent:
        """An event of this process alone. There may be any number of them."""

    def make_event(self) -> DeviceEvent:
        """An event that others can open, of which a device has about a thousand.

        The process that makes it records it; others wait for it.
        """

    def open_event(self, handle: bytes) -> DeviceEvent:
        """The event that another process has made, on this device or another one."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device on the side stream, to it or to pinned host memory.

        The source's memory is kept for as long. The calling thread goes on at once.
        """

    def pin(self, memory: mmap) -> Callable[[], None]:
        """Let the device reach host memory by itself, if that works: copies are faster, and nobody waits for them.

        Returns:
            What ends it, before the memory is unmapped.
        """

    def synchronize(self) -> None:
        """Wait until the device has done all that this process gave it."""


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
        close: lets go of all blocks once every peer has done so too, and waits at most so many seconds for that
            (a short time, where none is given). Views of entries end here.
    """

    rank: int
    runtime: DeviceRuntime
    nbytes: int
    slots: int
    readable: Mapping[int, ReadableBlock]
    readers: Mapping[int, Events]
    refusals: tuple[str, ...]
    close: Callable[..., None]

    @property
    def sentence(self) -> str:
        """Describes the memory of this rank's entries, for the log."""
        peers = sorted(self.readers.keys() - {self.rank})
        if not peers:
            used = "not used"
        else:
            used = f"{self.nbytes:,} bytes of {self.runtime.name}, read in place by ranks {', '.join(map(str, peers))}"
        return "; ".join([f"device memory of rank {self.rank}: {used}", *self.refusals])
