"""Knows which ranks are alive, what they do, and which one is to blame when the job cannot go on."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress

from flowtrain_lightning.pool.pool_errors import PeerFailed
from flowtrain_lightning.pool.status_page import State, Status, StatusPage

_LOOK_SECONDS = 0.02
_ENDING_SECONDS = 5.0
"""In which a process that the system takes apart is gone, on a busy machine as well."""


class StatusBoard:
    """The pages of all ranks, and whether their processes live. Safe to use from several threads.

    Args:
        pages: one per rank, the own one among them.
        processes: for each rank a ``pidfd``, or what can be read like one when a rank of another host is lost; None for
            the own process.
    """

    def __init__(self, pages: list[StatusPage], processes: list[int | None]) -> None:
        self.pages = pages
        self.processes = processes

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, rank: int) -> Status:
        return self.pages[rank].read()

    def died(self, rank: int) -> bool:
        """Whether the process of ``rank`` is gone. It cannot be taken for a later process of the same number."""
        process = self.processes[rank]
        if process is None:
            return False
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))

    def stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` lives but is stopped; on another host: lives but is silent."""
        return self.pages[rank].stopped() and not self.died(rank)

    def any_ending(self, rank: int) -> bool:
        """Whether another process than that of ``rank`` is on its way out, without a goodbye."""
        return any(page.rank != rank and page.state is not State.FINISHED and page.ending() for page in self.pages)

    def kill(self, rank: int) -> None:
        """End the process of a peer at once; nothing happens when it is gone already, or runs on another host."""
        process = self.processes[rank]
        if process is not None and not self.died(rank):
            with suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the processes; the pages can still be read."""
        for rank, process in enumerate(self.processes):
            if process is not None:
                self.processes[rank] = None
                os.close(process)


class WakeEvent:
    """A signal by which any thread tells the one that uses a mesh that something has arrived, or that all is over.

    Args:
        descriptor: an ``eventfd``, which peers of this host set, too; closed by `close`.

    Attributes:
        descriptor: the ``eventfd``; -1 when it is closed.
        fault: what all is over for, and the rank that is to blame; None while nothing is.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.fault: tuple[str, int | None] | None = None
        self._lock = threading.Lock()

    def set(self) -> None:
        """Wake whoever waits for it. Safe to call from any thread."""
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def abort(self, sentence: str, rank: int | None) -> None:
        """Say that all is over. Safe to call from any thread; the first sentence stays."""
        with self._lock:
            if self.fault is None:
                self.fault = (sentence, rank)
        self.set()

    def check(self) -> None:
        """Raise when all is over.

        Raises:
            PeerFailed: with the first sentence.
        """
        if self.fault is not None:
            raise PeerFailed(*self.fault)

    def close(self) -> None:
        """Let go of the descriptor."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1


def fault_sentence(status: Status, cause: str) -> str:
    """One sentence that names rank, role, phase, step and cause.

    Args:
        status: the page of the rank that is to blame.
        cause: a verb and what belongs to it, for example ``"died"``.
    """
    when = f"of step {status.step}" if status.step >= 0 else "before the first step"
    where = f"in phase '{status.phase}' {when}" if status.phase else "before its first phase"
    return f"Rank {status.rank} ({status.label}) {cause} {where}."


def find_fault(board: StatusBoard, rank: int) -> tuple[int, str] | None:
    """The rank that is to blame for a peer's end, and the sentence about it; None when no peer failed, died or hangs.

    A rank that ended because of another one says so in its page, so the trail leads back to the first. It may lead
    to ``rank`` itself, when it hangs and others have found that, or when it was the first of several that failed.
    """
    ended: dict[int, str] = {}
    for peer in range(len(board)):
        if peer != rank:
            died = board.died(peer)  # before its page is read: it may write a last word and then die
            sentence = _ended(board[peer], died)
            if sentence is not None:
                ended[peer] = sentence
    found = _found_by_peer(board, rank)
    if not ended:
        return found
    own = _ended(board[rank], died=False)
    if own is not None:
        ended[rank] = own
    first = min(ended, key=lambda peer: (board[peer].blames is not None, _when(board[peer]), peer))
    blamed = board[first].blames
    if blamed is None or blamed >= len(board):  # what stands in another rank's memory may be damaged
        blamed = first
    if found is not None and found[0] == blamed and board.pages[blamed].state is not State.FAILED:
        return found  # it may have been killed for that by now, or be lost to this rank a moment later
    sentence = _ended(board[blamed], board.died(blamed))  # looked at again: it may have ended since
    if sentence is not None:
        return blamed, sentence
    cause = "was stopped" if board.stopped(blamed) else f"was held to blame by rank {first} ({board[first].label})"
    return blamed, fault_sentence(board[blamed], cause)


def _found_by_peer(board: StatusBoard, rank: int) -> tuple[int, str] | None:
    """The rank that hangs or is lost, and what the peer that has found that says of it."""
    for peer in (peer for peer in range(len(board)) if peer != rank):
        status = board[peer]
        blamed = status.blames
        if blamed is None or blamed >= len(board) or status.state is State.FAILED:
            continue
        if status.error.startswith(f"Rank {blamed} ("):  # what stands in another rank's memory may be damaged
            return blamed, status.error.rstrip()
    return None


def blame_fault(board: StatusBoard, rank: int, peer: int, wait: float) -> tuple[int, str]:
    """The rank that is to blame now that ``peer`` is gone, and the sentence about it; the own page then blames it.

    Args:
        board: the pages of all ranks.
        rank: the calling rank.
        peer: whose connection has closed.
        wait: seconds until that process is seen to be gone or says why, and whoever it blames is seen to have ended.
    """
    deadline = time.monotonic() + wait
    found = find_fault(board, rank)
    while (found is None or not has_ended(board, found[0])) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS / 2)
        found = find_fault(board, rank)
    while found is None and board.pages[peer].ending() and time.monotonic() < deadline + _ENDING_SECONDS:
        time.sleep(_LOOK_SECONDS / 2)
        found = find_fault(board, rank)
    if found is None:
        board.pages[rank].blame(peer)
        how = "is ending" if board.pages[peer].ending() else "closed its connection without a goodbye"
        return peer, fault_sentence(board[peer], how)
    board.pages[rank].blame(*found)
    return found


def first_fault(board: StatusBoard, rank: int, wait: float = 1.0) -> str | None:
    """The sentence about the first fault, for a collective that fails because a peer has gone.

    A connection breaks a moment before its process counts as dead, so this looks for up to ``wait`` seconds. The
    calling rank's page then blames the peer, so that no other rank takes its own end for the first fault.

    Args:
        board: the pages of all ranks.
        rank: the calling rank.
        wait: seconds.

    Returns:
        The sentence, or None when no peer failed or died.
    """
    deadline = time.monotonic() + wait
    while True:
        fault = find_fault(board, rank)
        if fault is not None:
            board.pages[rank].blame(*fault)
            return fault[1]
        late = time.monotonic() - deadline
        if late >= _ENDING_SECONDS or (late >= 0 and not board.any_ending(rank)):
            return None
        time.sleep(_LOOK_SECONDS)


def has_ended(board: StatusBoard, rank: int) -> bool:
    """Whether the process of ``rank`` is gone, or has said why it ends."""
    return board.died(rank) or board.pages[rank].state is State.FAILED


def _when(status: Status) -> float:
    """When a rank ended. One that could not say so lived until its last heartbeat, or not much longer."""
    return status.failed_time or status.heartbeat_time


def _ended(status: Status, died: bool) -> str | None:
    """The sentence about a rank that failed or died, or None when it did neither."""
    if status.state is State.FAILED:
        if status.error.startswith(f"Rank {status.rank} "):  # it has found out itself that it hangs, and said so
            return status.error.rstrip()
        return f"{fault_sentence(status, 'failed')} Its error was:\n{status.error.rstrip()}"
    if died and status.state is not State.FINISHED:
        return fault_sentence(status, status.lost or f"died (process {status.pid} is gone)")
    return None
