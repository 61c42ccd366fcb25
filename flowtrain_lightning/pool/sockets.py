"""What goes through a unix socket: bytes, and descriptors that come along with them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence

from flowtrain_lightning.pool.errors import PoolError

_DESCRIPTOR = struct.Struct("i")
_MOST_DESCRIPTORS = 2  # with one record: a status page and a bell
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR.size)
_AT_ONCE_BYTES = 64 * 1024


def receive_bytes(connection: socket.socket, limit: int = _AT_ONCE_BYTES) -> tuple[bytes, tuple[int, ...]]:
    """What has arrived, up to ``limit`` bytes. No bytes at all: the other side has closed.

    Returns:
        The bytes, and the descriptors that came with them. The system ends what it hands out at once behind
        descriptors, so they belong to the record in which the bytes end.

    Raises:
        BlockingIOError: when nothing has arrived.
        PoolError: when more descriptors came than any record carries.
    """
    arrived, ancillary, flags, _ = connection.recvmsg(limit, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors: tuple[int, ...] = ()
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _DESCRIPTOR.size
            descriptors += tuple(number for (number,) in _DESCRIPTOR.iter_unpack(content[:whole]))
    if flags & socket.MSG_CTRUNC:
        close_all(descriptors)
        raise PoolError("More descriptors than a control record carries were refused. Do all ranks run one version?")
    return arrived, descriptors


def send_bytes(connection: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> int:
    """Send as much of a message as the other side takes, and copies of descriptors with its first byte.

    Returns:
        How many bytes were sent.

    Raises:
        BlockingIOError: when the other side has too much to read already.
    """
    if not descriptors:
        return connection.send(message)
    content = b"".join(map(_DESCRIPTOR.pack, descriptors))
    return connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, content)])


def close_all(descriptors: Iterable[int]) -> None:
    """Close what nobody needs."""
    for descriptor in descriptors:
        os.close(descriptor)
