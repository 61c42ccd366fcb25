"""A connection to one peer: records go in without waiting, what has arrived comes out with one system call."""

from __future__ import annotations

import os
import select
import socket
from collections import deque

from flowtrain_lightning.pool.record import Numbered, decode_records
from flowtrain_lightning.pool.sockets import receive_bytes, send_bytes


class Stream:
    """Both directions of a connection.

    Args:
        connection: connected and non-blocking; closed by `close`.
        peer: the rank at its other end.

    Attributes:
        peer: the same.
        descriptor: of the connection.
        error: what the system said when the connection broke; None while it is whole, or closed by the peer.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.peer = peer
        self.descriptor = connection.fileno()
        self.error: OSError | None = None
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
        except OSError as error:
            self.error = self.error or error.with_traceback(None)  # whose frames would keep all that they know
            queue.clear()  # it has ended; reading from it will say whether in good order

    def watch(self, epoll: select.epoll) -> None:
        """Be told by ``epoll``, which knows the connection, when the peer takes more of what is queued."""
        if self.queued != self._watched:
            self._watched = self.queued
            epoll.modify(self.descriptor, select.EPOLLIN | (select.EPOLLOUT if self.queued else 0))

    def read(self) -> list[Numbered] | None:
        """What has arrived: all of it unless it is much, then the rest has its turn later. None: the peer has closed.

        Raises:
            PoolError: when it is no valid record.
        """
        try:
            arrived, descriptors = receive_bytes(self._connection)
        except BlockingIOError:
            return []
        except OSError as error:  # for example: it closed before it had read everything
            self.error = self.error or error.with_traceback(None)  # whose frames would keep all that they know
            return None
        if not arrived:
            return None
        if self._cut:
            arrived, descriptors = self._cut + arrived, self._descriptors or descriptors
        found, nbytes = decode_records(arrived, self.peer)
        self._cut = arrived[nbytes:]
        self._descriptors = descriptors if self._cut else ()
        if descriptors and not self._cut:  # they came with the record in which the bytes end
            place, record = found[-1]
            found[-1] = place, record._replace(descriptors=descriptors)
        return found

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        self._connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()
