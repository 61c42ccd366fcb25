"""Status pages of other hosts: the form in which a page is sent, and the copy that is kept of it."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import replace
from mmap import PAGESIZE, mmap

from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.status_page import State, Status, StatusPage

_SILENT_SECONDS = 5.0  # without a page: that process does not get to run, or nothing gets through
# pid, state, step, progress, heartbeat, seconds since it, seconds since the failure (negative without one), sigterm,
# rank to blame or -1, in a collective, waiting for its loader, begun steps, bytes of label, phase and error
_NUMBERS = struct.Struct("<qBqqqddBqBBqIII")


def encode_status(status: Status) -> bytes:
    """The bytes that carry a status to another host, whose clock may read anything: moments become ages."""
    now = time.monotonic()
    texts = [text.encode() for text in (status.label, status.phase, status.error)]
    numbers = _NUMBERS.pack(
        status.pid,
        status.state,
        status.step,
        status.progress,
        status.heartbeat,
        now - status.heartbeat_time,
        now - status.failed_time if status.failed_time else -1.0,
        status.sigterm,
        -1 if status.blames is None else status.blames,
        status.in_collective,
        status.loading,
        status.begun,
        *map(len, texts),
    )
    return numbers + b"".join(texts)


def decode_status(rank: int, ranks: int, message: bytes | bytearray) -> Status:
    """The status of ``rank`` that these bytes carry.

    Raises:
        PoolError: when they carry none.
    """
    if len(message) < _NUMBERS.size:
        raise PoolError(f"Rank {rank} sent a status page that is cut off.")
    pid, state, step, progress, heartbeat, age, failed, sigterm, blames, collective, loading, begun, *lengths = (
        _NUMBERS.unpack_from(message)
    )
    if state > State.FAILED or not -1 <= blames < ranks or _NUMBERS.size + sum(lengths) != len(message):
        raise PoolError(f"Rank {rank} sent a status page that no rank writes. Do all ranks run the same version?")
    texts, start = [], _NUMBERS.size
    for length in lengths:
        texts.append(message[start : start + length].decode(errors="replace"))
        start += length
    now = time.monotonic()
    return Status(
        rank=rank,
        pid=pid,
        label=texts[0],
        state=State(state),
        phase=texts[1],
        step=step,
        progress=progress,
        heartbeat=heartbeat,
        heartbeat_time=now - age,
        sigterm=bool(sigterm),
        blames=blames if blames >= 0 else None,
        error=texts[2],
        failed_time=now - failed if failed >= 0 else 0.0,
        in_collective=bool(collective),
        loading=bool(loading),
        begun=begun,
    )


class RemoteStatusPage(StatusPage):
    """The page of a rank of another host, as old as its last message: a fraction of a second while all is well.

    Args:
        rank: whose page it is.
        label: what that rank is, until it says so itself.

    Attributes:
        ended: an ``eventfd`` that can be read once the rank is lost, as the ``pidfd`` of a process here; who closes
            the board closes it.
    """

    def __init__(self, rank: int, label: str) -> None:
        super().__init__(rank, mmap(-1, PAGESIZE))
        self.ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heard = time.monotonic()
        self._status = Status(
            rank=rank,
            pid=0,
            label=label,
            state=State.STARTING,
            phase="",
            step=-1,
            progress=0,
            heartbeat=0,
            heartbeat_time=self._heard,
            sigterm=False,
            blames=None,
            error="",
            failed_time=0.0,
            in_collective=False,
        )

    def update(self, status: Status) -> None:
        """Take in what the rank has sent."""
        self._status = status
        self.sigterm = status.sigterm
        self._heard = time.monotonic()

    def lose(self, cause: str) -> None:
        """Nothing more will come from this rank. The first cause stays.

        Args:
            cause: a verb and what belongs to it, for example ``"died"``.
        """
        if not self._status.lost:
            self._status = replace(self._status, lost=cause)
            os.eventfd_write(self.ended, 1)

    @property
    def state(self) -> State:
        """The last known state of the rank."""
        return self._status.state

    @property
    def progress(self) -> int:
        """The last known count of phases and advances."""
        return self._status.progress

    def read(self) -> Status:
        """The rank's last message."""
        return self._status

    def stopped(self) -> bool:
        """Whether the rank has been silent for so long that its process cannot be running."""
        return time.monotonic() - self._heard > _SILENT_SECONDS

    def ending(self) -> bool:
        """Nothing is known of that."""
        return False
