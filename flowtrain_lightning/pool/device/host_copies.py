"""Copies between a device and host memory for which no thread waits; what depends on them is done once they are.

Entries that peers cannot read in device memory pass through host memory. Two marks in streams keep every byte right::

    owner's current stream   the tensors are made
    owner's side stream      waits for that, copies them into the segment; when it has, the entry is published
    reader's current stream  copies them out of the segment; when it has, the entry is given back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from mmap import mmap
from typing import TypeVar

from torch import Tensor

from flowtrain_lightning.pool.device.device_tier import DeviceEvent, DeviceRuntime

COPY_SECONDS = 0.0005
"""How often a rank that waits for peers looks whether its own copies are done."""

_Received = TypeVar("_Received")


class HostCopies:
    """The copies of one rank's device that are underway.

    Args:
        runtime: the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._produced = runtime.make_mark()
        self._events: list[DeviceEvent] = []  # that nobody asks any more, to be recorded anew
        self._underway: list[tuple[DeviceEvent, Callable[[], None]]] = []
        self._unpin: list[Callable[[], None]] = []

    def pin(self, memory: mmap) -> None:
        """Lets the device reach host memory by itself until `close`; see `DeviceRuntime.pin`."""
        self._unpin.append(self._runtime.pin(memory))

    @property
    def are_underway(self) -> bool:
        """Whether something is left for `finish`, now or later."""
        return bool(self._underway)

    @property
    def are_due(self) -> bool:
        """Whether something is there for `finish` to do now."""
        return any(event.query() for event, _ in self._underway)

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all tensors lie on the device."""
        return all(map(self._runtime.holds, tensors))

    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], then: Callable[[], None]) -> None:
        """Lets the side stream copy what the current stream has made.

        Args:
            pairs: targets in host memory, and tensors on the device, which nobody may write meanwhile.
            then: is called by `finish` once all are copied.
        """
        self._produced.record(self._runtime.current())
        self._produced.wait(self._runtime.side)
        for target, source in pairs:
            self._runtime.copy(target, source)
        self._mark(self._runtime.side, then)

    def after_reads(self, then: Callable[[], None]) -> None:
        """Has `finish` call something once the current stream has done all that it was given until now."""
        self._mark(self._runtime.current(), then)

    def wait_for(self, receive: Callable[[float], list[_Received]], timeout: float) -> list[_Received]:
        """What peers send, as soon as there is some, or nothing once copies are due or the time has passed.

        Args:
            receive: waits so many seconds at most for what peers send.
            timeout: seconds.
        """
        end = time.perf_counter() + timeout
        while True:
            received = receive(0.0 if self.are_due else COPY_SECONDS)
            if received or self.are_due or time.perf_counter() >= end:
                return received

    def finish(self) -> bool:
        """Calls what is due; returns whether anything was."""
        due = [each for each in self._underway if each[0].query()]
        if due:
            self._underway = [each for each in self._underway if each not in due]
            for event, then in due:
                self._events.append(event)
                then()
        return bool(due)

    def close(self) -> None:
        """Waits for all copies, forgets what was to be done after them, and unpins all memory."""
        self._runtime.synchronize()
        self._underway.clear()
        while self._unpin:
            self._unpin.pop()()

    def _mark(self, stream: object, then: Callable[[], None]) -> None:
        event = self._events.pop() if self._events else self._runtime.make_mark()
        event.record(stream)
        self._underway.append((event, then))
