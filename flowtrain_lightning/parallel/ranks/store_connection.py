"""Connects to the store at which ranks meet; where something else is there, a sentence says so within a minute."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

LOOK_SECONDS = 5.0
"""Between two looks at who is there; a store answers within milliseconds, but rank 0 may come later than the others."""

STRANGE_SECONDS = 45.0
"""For so long, from the first look on, a program may say nothing or what no store says."""

_ANSWER_SECONDS = 2.0  # which it gets to say something when it is looked at
_WORDS = b"is this the store of a flowtrain job?\r\n\r\n"  # which closes the connection of whoever says so
_MOST_SHOWN = 40  # bytes of an answer


class NoStoreError(RuntimeError):
    """Something else than the job's store is where the ranks are to meet."""


def connect_to_store(connect: Callable[[], Store], host: str, port: int, timeout: float) -> Store:
    """Returns the store that ``connect`` makes at this address.

    PyTorch tries again where a connection fails, but waits for ever for a word from a program that lets it in and says
    nothing. So it connects in a thread of its own, while this one looks from time to time at who is there.

    Args:
        connect: makes the store, and raises where it cannot.
        host: where it is.
        port: where it is.
        timeout: seconds for all of it.

    Raises:
        NoStoreError: a program that is no store is there, for a minute or to the end of the time.
        RuntimeError: from ``connect``, where nothing is there.
    """
    attempt = _Attempt(connect)
    start = time.monotonic()
    strange_since: float | None = None
    wait = min(LOOK_SECONDS, timeout)
    while not attempt.ended(wait):
        found = _who_is_there(host, port)
        if attempt.ended(0):
            break
        now = time.monotonic()
        if found is not None and found.startswith((_SILENT, _ANSWERS)):  # a store closes the connection instead
            strange_since = now if strange_since is None else strange_since
        elif found != _UNANSWERED:  # which a silent program's port is too, once its queue is full
            strange_since = None
        if now >= start + timeout or (strange_since is not None and now >= strange_since + STRANGE_SECONDS):
            raise RuntimeError("nobody listens") if found is None else _no_store(host, port, found, now - start)
        wait = min(LOOK_SECONDS, max(start + timeout - now, 0.0))
    if attempt.error is not None:
        found = None if "EADDRINUSE" in str(attempt.error) else _who_is_there(host, port)
        raise attempt.error if found is None else _no_store(host, port, found, time.monotonic() - start)
    assert attempt.store is not None
    return attempt.store


class _Attempt:
    """A thread that connects; where it never ends the process can end without it."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self.store: Store | None = None
        self.error: Exception | None = None
        self._connect = connect
        self._thread = threading.Thread(target=self._run, name="flowtrain-store", daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Whether it ends within these seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.store = self._connect()
        except Exception as error:
            self.error = error


_SILENT = "a program lets everybody in and says nothing"
_ANSWERS = "a program answers"
_CLOSES = "a program closes every connection"
_UNANSWERED = "nothing answers those who connect, as behind a firewall"


def _who_is_there(host: str, port: int) -> str | None:
    """Describes a program at this address that cannot be the job's store; None where nobody listens."""
    try:
        connection = socket.create_connection((host, port), _ANSWER_SECONDS)
    except TimeoutError:
        return _UNANSWERED
    except ConnectionResetError:
        return _CLOSES
    except OSError:
        return None
    with connection:
        try:
            connection.sendall(_WORDS)
            answer = connection.recv(_MOST_SHOWN)
        except TimeoutError:
            return _SILENT
        except OSError:
            answer = b""
    return f"{_ANSWERS} {answer!r}" if answer else _CLOSES


def _no_store(host: str, port: int, found: str, seconds: float) -> NoStoreError:
    return NoStoreError(
        f"The ranks are to meet at {host}:{port} (MASTER_ADDR and MASTER_PORT), but for {seconds:.0f} s no store has "
        f"answered there: {found}. Expected the store that rank 0 or torchrun keeps. Is the address that of rank 0's "
        "host, and the port free on it? Set MASTER_PORT to another one on all ranks; if it is right, see whether "
        "rank 0 is stopped or has met an error."
    )
