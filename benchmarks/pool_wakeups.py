"""How a sleeping process is woken: mechanisms of the kernel beside the pool's, each by itself and from Python."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any, Protocol

_FUTEX = 202  # the number of the system call on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SPIN_SECONDS = 20e-6
_SHARED = mmap(-1, 4096)  # before the fork, so that both processes have it


class Waker(Protocol):
    """Wakes one process from another; made before the fork."""

    def wake(self) -> None:
        """Wake whoever sleeps."""

    def sleep(self) -> None:
        """Sleep until somebody wakes this process."""


class SocketWaker:
    """A record of 56 bytes over a unix socket, and epoll."""

    def __init__(self, kind: int) -> None:
        self._near, self._far = socket.socketpair(socket.AF_UNIX, kind)
        self._epoll: select.epoll | None = None

    def wake(self) -> None:
        self._near.send(bytes(56))

    def sleep(self) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._epoll.register(self._far, select.EPOLLIN)
        self._epoll.poll()
        self._far.recv(4096)


class EventWaker:
    """An eventfd and epoll; before it sleeps, the sleeper may look at shared memory for a while."""

    def __init__(self, spin_seconds: float = 0.0) -> None:
        self._event = os.eventfd(0)
        self._epoll: select.epoll | None = None
        self._spin_seconds = spin_seconds
        start = 128 if spin_seconds else 64
        self._word = memoryview(_SHARED)[start : start + 8].cast("Q")
        self._heard = self._word[0]

    def wake(self) -> None:
        self._word[0] += 1
        os.eventfd_write(self._event, 1)

    def sleep(self) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._epoll.register(self._event, select.EPOLLIN)
        end = time.monotonic() + self._spin_seconds
        while self._spin_seconds and self._word[0] == self._heard and time.monotonic() < end:
            pass
        self._epoll.poll()
        os.eventfd_read(self._event)
        self._heard = self._word[0]


class FutexWaker:
    """A futex on shared memory, by ``ctypes``."""

    def __init__(self) -> None:
        self._call: Any = ctypes.CDLL(None, use_errno=True).syscall
        self._word = ctypes.c_uint32.from_buffer(_SHARED)
        self._heard = self._word.value

    def wake(self) -> None:
        self._word.value += 1
        self._call(_FUTEX, ctypes.byref(self._word), _FUTEX_WAKE, 1, None, None, 0)

    def sleep(self) -> None:
        while self._word.value == self._heard:
            self._call(_FUTEX, ctypes.byref(self._word), _FUTEX_WAIT, self._heard, None, None, 0)
        self._heard = self._word.value


def wakers() -> dict[str, Waker]:
    """All mechanisms, by name."""
    made: dict[str, Waker] = {
        "epoll on SOCK_SEQPACKET": SocketWaker(socket.SOCK_SEQPACKET),
        "epoll on SOCK_STREAM": SocketWaker(socket.SOCK_STREAM),
        "epoll on eventfd": EventWaker(),
        f"spin {_SPIN_SECONDS * 1e6:.0f} us, then eventfd": EventWaker(_SPIN_SECONDS),
    }
    if os.uname().machine == "x86_64":
        made["futex"] = FutexWaker()
    return made


def answer(made: dict[str, Waker], pipe: Connection) -> None:
    """In the other process: sleeps as it is told, and says when it woke."""
    while (name := pipe.recv()) is not None:
        made[name].sleep()
        pipe.send(time.monotonic_ns())


def wake_up_seconds(waker: Waker, name: str, pipe: Connection, idle: bool) -> float:
    """From just before the call until the other process runs, in seconds.

    Args:
        waker: wakes the other process.
        name: its name.
        pipe: leads to the other process.
        idle: both processes sleep for a millisecond before; else the calling one works until the other one sleeps.
    """
    pipe.send(name)
    pause(idle)
    start = time.monotonic_ns()
    waker.wake()
    woke: int = pipe.recv()
    return (woke - start) / 1e9


def pause(idle: bool) -> None:
    """Long enough for another process to fall asleep."""
    if idle:
        time.sleep(1e-3)
        return
    end = time.monotonic() + 1e-4
    while time.monotonic() < end:
        pass
