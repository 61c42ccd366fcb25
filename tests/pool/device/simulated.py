"""A device that is made of CPU memory and threads, and as slow and as unhelpful as a real one may be.

Blocks and events lie in anonymous memory that other processes open by a handle. What a stream is given it does later,
in a thread of its own, with random pauses; events are all that holds it back. A `Stepped` stream does nothing until a
test says so.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from flowtrain_lightning.pool.device.device_tier import HANDLE_BYTES, DeviceBlock
from flowtrain_lightning.pool.pool_errors import PoolError

_MOST_EVENTS = 1024
_WORD = 8


class Eager:
    """A stream that does at once what it is given, as the thread that gives it: it never runs late."""

    def put(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, event: Event, mark: int) -> None:
        end = time.monotonic() + 20
        while not event.reached(mark):
            assert time.monotonic() < end, "nobody comes to what this stream waits for"
            time.sleep(0.0001)

    def finish(self) -> None:
        """Nothing is left to do."""

    close = finish


class Stepped:
    """A stream that does nothing until it is told to."""

    def __init__(self) -> None:
        self._work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def put(self, work: Callable[[], None]) -> None:
        self._work.append((lambda: True, work))

    def wait(self, event: Event, mark: int) -> None:
        self._work.append((lambda: event.reached(mark), lambda: None))

    def step(self) -> bool:
        """Do the next thing; False when there is none, or an event holds it back."""
        if not self._work or not self._work[0][0]():
            return False
        self._work.popleft()[1]()
        return True

    def finish(self) -> None:
        """Somebody else lets it finish."""

    def close(self) -> None:
        """Nothing runs."""


class Late(Stepped):
    """A stream that does what it is given in a thread, some time later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._pauses = random.Random(seed)
        self._given = threading.Semaphore(0)
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        super().put(work)
        self._given.release()

    def wait(self, event: Event, mark: int) -> None:
        super().wait(event, mark)
        self._given.release()

    def finish(self) -> None:
        """Wait until it has done everything; an error of something that it did is raised here."""
        done = threading.Event()
        self.put(done.set)
        assert done.wait(20), "this stream waits for what nobody does"
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, though not all may be done."""
        self._closed = True
        self._given.release()
        self._thread.join(20)

    def _run(self) -> None:
        while True:
            self._given.acquire()
            time.sleep(self._pauses.choice([0, 0, 0.0005, 0.002]))
            while not self._closed and not self._step():
                time.sleep(0.0001)
            if self._closed:
                return

    def _step(self) -> bool:
        try:
            return self.step()
        except BaseException as error:
            self._error = self._error or error
            return True


class Event:
    """Two counts in shared memory: marks that were set, and the latest that a stream has come to."""

    def __init__(self, words: memoryview, name: str) -> None:
        self._words = words
        self._name = name

    def record(self, stream: Stepped | Eager) -> None:
        mark = self._words[0] = self._words[0] + 1
        stream.put(lambda: self._reach(mark))

    def wait(self, stream: Stepped | Eager) -> None:
        stream.wait(self, self._words[0])

    def query(self) -> bool:
        return self.reached(self._words[0])

    def reached(self, mark: int) -> bool:
        return self._words[1] >= mark

    def ipc_handle(self) -> bytes:
        return self._name.encode().ljust(HANDLE_BYTES, b"\0")

    def _reach(self, mark: int) -> None:
        self._words[1] = max(self._words[1], mark)


class SimulatedRuntime:
    """One rank's device: a card of its own or one that it shares, which for the order of streams is the same.

    Args:
        side: the stream of the pool's copies.
        current: the stream of the rank's own work.
        blind: opening what others made fails, as in a container of its own.

    Attributes:
        current_stream: the stream of the rank's own work.
        events: two counts for each event, in shared memory.
        pinned: how many stretches of host memory are.
        room: bytes of the device that nobody has.
        kept: bytes of it that this process has freed and keeps for later.
        closed: which blocks were freed, or closed in this process, in that order.
    """

    def __init__(self, side: Stepped | Eager, current: Stepped | Eager, blind: bool = False) -> None:
        self.name = "a simulated device"
        self.side = side
        self.current_stream = current
        self._blind = blind
        self._descriptors: list[int] = []  # stay open, since their paths are how others open the memory
        self._events_name, events = self._share("flowtrain simulated events", _MOST_EVENTS * 2 * _WORD)
        self.events = memoryview(events).cast("Q")
        self._made = 0
        self.pinned = 0
        self.room, self.kept = 1 << 40, 0
        self.closed: list[tuple[str, str]] = []

    def current(self) -> Stepped | Eager:
        return self.current_stream

    def holds(self, tensor: Tensor) -> bool:
        return True

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def to_host(self, tensor: Tensor) -> Tensor:
        self.current_stream.finish()
        return tensor.clone()

    def allocate(self, nbytes: int) -> DeviceBlock:
        if nbytes > self.room:
            raise PoolError("out of memory")
        name, memory = self._share("flowtrain simulated block", nbytes)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        return DeviceBlock(block, _handle(name), lambda: self.closed.append(("freed", name)))

    def open_block(self, handle: bytes, nbytes: int) -> DeviceBlock:
        memory = torch.frombuffer(self._open(handle), dtype=torch.uint8)
        assert len(memory) == nbytes
        return DeviceBlock(memory, handle, lambda: self.closed.append(("closed", handle.rstrip(b"\0").decode())))

    def make_room(self) -> None:
        self.room, self.kept = self.room + self.kept, 0

    def make_mark(self) -> Event:
        return Event(memoryview(bytearray(2 * _WORD)).cast("Q"), "of this process alone")

    def make_event(self) -> Event:
        first, self._made = 2 * self._made, self._made + 1
        return Event(self.events[first : first + 2], f"{self._events_name}:{first}")

    def open_event(self, handle: bytes) -> Event:
        name, _, first = handle.rstrip(b"\0").decode().rpartition(":")
        memory = memoryview(self._open(_handle(name))).cast("Q")
        return Event(memory[int(first) : int(first) + 2], name)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.side.put(lambda: target.copy_(source))

    def pin(self, memory: mmap.mmap) -> Callable[[], None]:
        self.pinned += 1

        def end() -> None:
            self.pinned -= 1

        return end

    def synchronize(self) -> None:
        self.side.finish()
        self.current_stream.finish()

    def close(self) -> None:
        """End what the simulation has running."""
        for stream in (self.side, self.current_stream):
            stream.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _share(self, name: str, nbytes: int) -> tuple[str, mmap.mmap]:
        """Memory that other processes of this machine can open under a path."""
        descriptor = os.memfd_create(name)
        self._descriptors.append(descriptor)
        os.truncate(descriptor, nbytes)
        return f"/proc/{os.getpid()}/fd/{descriptor}", mmap.mmap(descriptor, nbytes)

    def _open(self, handle: bytes) -> mmap.mmap:
        if self._blind:
            raise PoolError("invalid device context")
        descriptor = os.open(handle.rstrip(b"\0").decode(), os.O_RDWR)
        try:
            return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


def simulated(rank: int, late: bool = False, blind: bool = False) -> SimulatedRuntime:
    """A device whose copies run late and, where a test can bear it, its rank's own work too."""
    return SimulatedRuntime(Late(rank), Late(1000 + rank) if late else Eager(), blind)


def _handle(name: str) -> bytes:
    return name.encode().ljust(HANDLE_BYTES, b"\0")
