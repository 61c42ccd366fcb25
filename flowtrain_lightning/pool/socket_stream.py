"""Control records over a unix socket: they go in without waiting, what has arrived comes out with one system call.

Descriptors come along with them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence

from flowtrain_lightning.pool.control_records import ControlRecord, decode_records
from flowtrain_lightning.pool.pool_errors import PoolError

_DESCRIPTOR = struct.Struct("i")
_MOST_DESCRIPTORS = 2  # with one record: a status page and a wake event
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR.size)
_AT_ONCE_BYTES = 64 * 1024


class SocketStream:
    """Both directions of a connection to one peer.

    Args:
        connection: connected and non-blocking; closed by `close`.
        peer: the rank at its other end.

    Attributes:
        peer: the rank at its other end.
        descriptor: of the connection.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.peer = peer
        self.descriptor = connection.fileno()
        self._connection = connection
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._cut = b""  # the begin of a record whose end is to come
        self._descriptors: tuple[int, ...] = ()  # what came with that
        self._watched = False

    @property
    def queued(self) -> bool:
        """Whether something waits until the peer has read more."""
        return bool(self._queue)

    def send(self, record: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a record, or queue it behind others. Never waits."""
        self._queue.append((record, descriptors))
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what is queued, as much as the peer takes."""
        queue = self._queue
        try:
            while queue:
                message, descriptors = queue[0]
                sent = send_bytes(self._connection, message, descriptors)
                if sent < len(message):
                    queue[0] = message[sent:], ()
                else:
                    queue.popleft()
        except BlockingIOError:
            return
        except OSError:
            queue.clear()  # it has ended; reading from it will say whether in good order

    def watch(self, epoll: select.epoll) -> None:
        """Be told by ``epoll``, which knows the connection, when the peer takes more of what is queued."""
        if self.queued != self._watched:
            self._watched = self.queued
            epoll.modify(self.descriptor, select.EPOLLIN | (select.EPOLLOUT if self.queued else 0))

    def read(self) -> list[ControlRecord] | None:
        """Reads what has arrived; of much a part, the rest has its turn later. None: the peer has closed.

        Raises:
            PoolError: when it is no valid record.
        """
        try:
            arrived, descriptors = receive_bytes(self._connection)
        except BlockingIOError:
            return []
        except OSError:  # for example: it closed before it had read everything
            return None
        if not arrived:
            return None
        if self._cut:
            arrived, descriptors = self._cut + arrived, self._descriptors or descriptors
        found, nbytes = decode_records(arrived, self.peer)
        self._cut = arrived[nbytes:]
        self._descriptors = descriptors if self._cut else ()
        if descriptors and not self._cut:  # they came with the record in which the bytes end
            found[-1] = found[-1]._replace(descriptors=descriptors)
        return found

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        self._connection.close()
        close_descriptors(self._descriptors)
        self._descriptors = ()


def receive_bytes(connection: socket.socket, limit: int = _AT_ONCE_BYTES) -> tuple[bytes, tuple[int, ...]]:
    """Reads what has arrived, up to ``limit`` bytes. No bytes at all: the other side has closed.

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
        close_descriptors(descriptors)
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


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Close what nobody needs."""
    for descriptor in descriptors:
        os.close(descriptor)
