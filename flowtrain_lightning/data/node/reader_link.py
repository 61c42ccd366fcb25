"""A process asks its node's reader through a Unix socket, opened when something is asked for the first time."""

from __future__ import annotations

import os
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

from flowtrain_lightning.data.data_error import DataError

_CREDENTIALS = struct.Struct("3i")
"""Of the process at the other end, by the kernel: its number, user and group."""


class ReaderLink:
    """The way to a node's reader. It may be forked or sent to other processes: each opens a connection of its own.

    Args:
        address: of the reader's socket, in the abstract namespace: no file, which ends with the reader.
        read: names of what is read, for messages.
    """

    def __init__(self, address: str, read: str) -> None:
        self._address = address
        self._read = read
        self._lock = threading.Lock()
        self._connections: dict[tuple[int, str], Connection] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ReaderLink, (self._address, self._read)

    def ask(self, stage: str, method: str, *args: Any) -> Any:
        """An answer of the reader.

        Args:
            stage: whose data are meant.
            method: of those that the reader has for them.
            args: of the method.

        Raises:
            DataError: the reader could not read, or has ended.
        """
        with self._lock:
            try:
                connection = self._connection(stage)
                connection.send((method, args))
                answer, error = connection.recv()
            except (EOFError, OSError) as lost:
                raise DataError(
                    f"The process that reads {self._read} for the ranks of this node has ended ({lost!r}). The output "
                    "of the node's first rank may say why; if nothing does, the system may have ended it for want of "
                    "memory. Start again from the last checkpoint."
                ) from lost
        if error is not None:
            raise error
        return answer

    def _connection(self, stage: str) -> Connection:
        key = os.getpid(), stage
        if key not in self._connections:
            self._connections = {own: one for own, one in self._connections.items() if own[0] == key[0]}
            opened = socket.socket(socket.AF_UNIX)
            opened.connect(self._address)
            if not of_this_user(opened):
                raise ConnectionError("another user listens in its place")
            self._connections[key] = Connection(opened.detach())
            self._connections[key].send(stage)
        return self._connections[key]


def of_this_user(peer: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())
