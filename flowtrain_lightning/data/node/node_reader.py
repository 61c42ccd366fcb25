"""The process that reads streams, tar shards and Parquet files for all ranks of a node, so that each is read once.

The node's first rank forks it before training. It ends with that rank; a rank that finds it gone ends with its name.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.loading.workers import end_with_starter, fork_lock
from flowtrain_lightning.data.node.reader_link import of_this_user

_BACKLOG = 1024
"""Processes that may be connecting at the same time."""


class Served(Protocol):
    """One stage's data, as the reader has them."""

    def answer(self, reader: int, method: str, args: tuple[Any, ...]) -> Any:
        """A request of a process."""
        ...

    def leave(self, reader: int) -> None:
        """The process has ended."""
        ...


def new_address() -> str:
    """The address of a reader, in the abstract namespace, where nothing is left when it ends."""
    return f"\0flowtrain-reader-{secrets.token_hex(16)}"


def can_read_for_others() -> bool:
    """Whether there are sockets without a file here, whose other end the kernel names."""
    return sys.platform == "linux"


class NodeReader:
    """A process that answers for the data of all stages. It ends with :meth:`close`, and with the thread that made it.

    Args:
        address: at which it listens.
        served: stage -> its data.
    """

    def __init__(self, address: str, served: Mapping[str, Served]) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(_BACKLOG)
        starter = os.getpid()
        with fork_lock.forking():
            self.process = os.fork()
        if self.process == 0:
            try:
                _serve(listening, served, starter)
            finally:
                os._exit(1)
        listening.close()
        self.close = weakref.finalize(self, _end, self.process, starter)


def _end(process: int, starter: int) -> None:
    if os.getpid() != starter:  # a fork of the rank, whose child it is not
        return
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(process, 0)


def _serve(listening: socket.socket, served: Mapping[str, Served], starter: int) -> None:
    """Answer whoever connects, each in a thread of its own, for ever."""
    end_with_starter()
    if os.getppid() != starter:
        return
    # Sent to all processes of a job before its end is a signal by which ranks save: they still read meanwhile.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    for reader in itertools.count():
        opened, _ = listening.accept()
        if not of_this_user(opened):
            opened.close()
            continue
        connection = Connection(opened.detach())
        threading.Thread(target=_answer, args=(reader, connection, served), daemon=True).start()


def _answer(reader: int, connection: Connection, served: Mapping[str, Served]) -> None:
    """Answer one process until it ends."""
    data = None
    try:
        data = served[connection.recv()]
        while True:
            method, args = connection.recv()
            connection.send(_answered(data, reader, method, args))
    except (EOFError, OSError):
        return
    finally:
        connection.close()
        if data is not None:
            data.leave(reader)


def _answered(data: Served, reader: int, method: str, args: tuple[Any, ...]) -> tuple[Any, DataError | None]:
    try:
        return data.answer(reader, method, args), None
    except DataError as error:
        return None, error
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        return None, DataError(f"The process that reads for the ranks of this node has failed: {told}")
