"""Two hosts made of network namespaces, joined by a link with limited bandwidth, delay and loss that can be cut.

Where the kernel has ``netem`` it spoils the link; where it has not, a process does that forwards the packets.

As a script, ``hosts.py HOST JOB COMMAND...`` runs a command on a host.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.213.77.1", "10.213.77.2")
MEGABITS, DELAY_SECONDS, LOSS = 100.0, 0.002, 0.01

_NAMESPACES = Path("/run/netns")
_TUN = Path("/dev/net/tun")
_SET_INTERFACE, _PACKETS_ONLY = 0x400454CA, 0x0001 | 0x1000  # TUNSETIFF; IFF_TUN and IFF_NO_PI
_NEW_NETWORK, _NEW_NAME, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS
_PRIVATE = 0x4000 | 1 << 18  # MS_REC and MS_PRIVATE
_MOST_QUEUED_BYTES = 256 * 1024


def why_not() -> str | None:
    """Why this machine cannot make hosts, or None where it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no `ip` and `tc` here (package iproute2)"
    try:
        with Hosts():
            return None
    except subprocess.CalledProcessError as error:
        return f"the machine does not allow it: {' '.join(error.cmd)}: {error.stderr.strip()}"
    except OSError as error:
        return f"the machine does not allow it: {error}"


def enter(host: int, job: int) -> None:
    """Move the calling thread, and those that it starts, to a host that process ``job`` has made: ``host-0`` or -1."""
    descriptor = os.open(_NAMESPACES / _name(host, job), os.O_RDONLY)
    _call("setns", descriptor, _NEW_NETWORK)
    os.close(descriptor)
    _call("unshare", _NEW_NAME)
    socket.sethostname(f"host-{host}")


def cut(job: int) -> None:
    """From now on nothing passes between the hosts that process ``job`` has made, and nobody is told."""
    _ip("-n", _name(1, job), "link", "set", "flow1", "down")


def own_disk(folder: Path) -> None:
    """Put an empty file system over a folder, which the calling thread, and those that it starts, alone see."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", None, b"/", None, ctypes.c_ulong(_PRIVATE), None)
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), None)


def own_interfaces() -> None:
    """Let /sys show the calling thread, and those that it starts, the interfaces of the host that it has entered."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", None, b"/", None, ctypes.c_ulong(_PRIVATE), None)
    _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)


def on_host(host: int, command: Sequence[str]) -> list[str]:
    """The command that runs a command on a host that this process has made."""
    return [sys.executable, "-S", __file__, str(host), str(os.getpid()), *command]


class Hosts:
    """A context manager that makes both hosts and removes them, whatever happens inside."""

    def __init__(self) -> None:
        self._relay = 0

    def __enter__(self) -> Hosts:
        for stale in _NAMESPACES.glob("flowtrain-*-[01]"):  # of a process that was killed before it could remove them
            if not Path(f"/proc/{stale.name.split('-')[1]}").exists():
                _ip("netns", "delete", stale.name, check=False)
        try:
            for host in (0, 1):
                _ip("netns", "add", _name(host))
            if not self._join_with_netem():
                self._join_with_relay()
            for host, address in enumerate(ADDRESSES):
                inside = ("-n", _name(host))
                _ip(*inside, "address", "add", f"{address}/24", "dev", f"flow{host}")
                _ip(*inside, "link", "set", "lo", "up")
                _ip(*inside, "link", "set", f"flow{host}", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def cut(self) -> None:
        """Nothing passes any more, in either direction; nobody is told."""
        cut(os.getpid())

    def mend(self) -> None:
        """Everything passes again."""
        _ip("-n", _name(1), "link", "set", "flow1", "up")

    def _join_with_netem(self) -> bool:
        ends = [("flow0", "netns", _name(0)), ("flow1", "netns", _name(1))]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        rules = ["rate", f"{MEGABITS}mbit", "delay", f"{DELAY_SECONDS * 1000}ms", "loss", f"{LOSS * 100}%"]
        for host in (0, 1):
            command = ["tc", "-n", _name(host), "qdisc", "add", "dev", f"flow{host}", "root", "netem", *rules]
            if subprocess.run(command, capture_output=True).returncode != 0:
                _ip("-n", _name(0), "link", "delete", "flow0")
                return False
        return True

    def _join_with_relay(self) -> None:
        ends = []
        for host in (0, 1):
            end = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            ends.append(end)
            interface = f"flow{host}-{os.getpid()}"[:15]
            fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", interface.encode(), _PACKETS_ONLY))
            _ip("link", "set", interface, "netns", _name(host), "name", f"flow{host}")
        from flowtrain_lightning.runtime.process_end import (
            die_with_parent,  # it takes torch, for which no host shall wait
        )

        parent = os.getpid()
        self._relay = os.fork()
        if self._relay == 0:
            try:
                die_with_parent(parent=parent)
                _relay(ends)
            finally:
                os._exit(1)
        for end in ends:
            os.close(end)

    def _remove(self) -> None:
        if self._relay:
            with suppress(ProcessLookupError):
                os.kill(self._relay, signal.SIGKILL)
            os.waitpid(self._relay, 0)
            self._relay = 0
        for host in (0, 1):
            if (_NAMESPACES / _name(host)).exists():
                _ip("netns", "delete", _name(host), check=False)


class _Direction:
    """Packets on their way from one end to the other."""

    def __init__(self) -> None:
        self._packets: deque[tuple[float, bytes]] = deque()  # with the moment when each arrives
        self._busy_until = 0.0
        self._queued = 0

    def enter(self, packet: bytes, choose: random.Random) -> None:
        if choose.random() < LOSS or self._queued + len(packet) > _MOST_QUEUED_BYTES:
            return
        self._queued += len(packet)
        self._busy_until = max(self._busy_until, time.monotonic()) + len(packet) * 8 / (MEGABITS * 1e6)
        self._packets.append((self._busy_until + DELAY_SECONDS, packet))

    def leave(self, end: int) -> float:
        """Let out what has arrived; seconds until more does."""
        while self._packets:
            wait = self._packets[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, packet = self._packets.popleft()
            self._queued -= len(packet)
            with suppress(OSError):  # the other end is down, or has no room: the packet is lost
                os.write(end, packet)
        return 1.0


def _relay(ends: list[int]) -> None:
    choose = random.Random(7)
    directions = {ends[0]: (_Direction(), ends[1]), ends[1]: (_Direction(), ends[0])}
    while True:
        wait = min(direction.leave(to) for direction, to in directions.values())
        for end in select.select(ends, [], [], wait)[0]:
            with suppress(OSError):  # nothing left to read, or the end is down
                for _ in range(64):
                    directions[end][0].enter(os.read(end, 65536), choose)


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def _name(host: int, job: int | None = None) -> str:
    return f"flowtrain-{job or os.getpid()}-{host}"


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


if __name__ == "__main__":
    enter(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
