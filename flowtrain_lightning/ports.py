"""TCP ports of this process, and how to let nobody in any more while those stay who have come."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # a packet filter of one instruction: return 0 bytes


def shut(listener: socket.socket) -> None:
    """Let nobody in any more at a socket that listens.

    The kernel drops what comes for it. To close it would be for whoever uses it: ZeroMQ would end the connections that
    came through it as well, and gloo cannot be asked.
    """
    code = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HxxxxxxP", len(_DROP_ALL) // 8, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


@contextmanager
def shut_at_the_end() -> Iterator[None]:
    """Ports that this process opens inside let nobody in afterwards."""
    before = _listening()
    yield
    for descriptor in _listening() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            shut(listener)


def _listening() -> set[int]:
    """The descriptors of all TCP sockets that listen."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as each:
                is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
                if is_tcp and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(descriptor)
    return found
