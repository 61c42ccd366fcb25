"""Finds the rank to blame among those of a connected job: one that died, failed, was stopped, is held or hangs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from flowtrain_lightning.pool import Mesh, State, Status, fault_sentence, find_fault, has_ended
from flowtrain_lightning.runtime.main_thread import main_is_debugged, main_waits_for_data, main_waits_for_ranks
from flowtrain_lightning.runtime.process_tree import stopped_descendants

_HELD_SECONDS = 5.0
"""Without a heartbeat: not even the monitor of that process gets to run."""

_LATE_SECONDS = 1.0
"""Without a heartbeat: on a busy machine it may still come, so nobody is blamed before it has or has not."""


@dataclass(frozen=True)
class Fault:
    """A fault that ends the job.

    Attributes:
        rank: who is to blame, or None when all ranks wait for each other.
        sentence: what happened.
        hang: whether it was found by a lack of progress, so that a stack tells more.
    """

    rank: int | None
    sentence: str
    hang: bool


class JoinedRanks:
    """The ranks of a connected job, as the monitor of one of them sees them.

    A single rank is watched for hangs only: whoever called ``fit`` may handle its errors.

    Args:
        mesh: connects the ranks.
        hang_timeout: seconds without progress of any rank after which the job ends.
        start_timeout: the same until every rank has begun its first step; a rank that is stopped is not waited for.
    """

    def __init__(self, mesh: Mesh, hang_timeout: float, start_timeout: float) -> None:
        self.mesh = mesh
        self._board = mesh.board
        self._hang_timeout = hang_timeout
        self._start_timeout = start_timeout
        self._progress = [-1] * mesh.ranks
        self._looked = time.monotonic()
        self._since = [self._looked] * mesh.ranks  # when each rank last made progress

    def look(self) -> Fault | None:
        """Show this process's heartbeat; what is wrong with the job, if anything."""
        page = self.mesh.page
        page.beat()
        page.tell_main_thread(in_collective=main_waits_for_ranks(), loading=main_waits_for_data())
        fault = self._ended_rank() if self.mesh.ranks > 1 else None
        if fault is not None:
            return fault
        silent = self._silent_seconds()
        if silent < self._hang_timeout or (self.mesh.ranks == 1 and self._is_left_alone()):
            return None
        return self._hang(silent)

    def held_alone(self) -> tuple[float, str]:
        """Of a single rank, whose monitor still runs: in how many seconds it hangs if that ends, and what to say then.

        Infinite where nothing is a hang: it may handle an error, or stand in a debugger.
        """
        status = self.mesh.page.read()
        limit = self._start_timeout if status.state is State.STARTING else self._hang_timeout
        left = limit - (time.monotonic() - self._since[0])
        seconds = math.inf if self._is_left_alone() else max(left, _HELD_SECONDS)
        return seconds, _held(status, limit)

    def kill_stopped(self) -> None:
        """Kill the peers that cannot end themselves."""
        for rank in range(len(self._board)):
            status = self._board[rank]
            if rank == self.mesh.rank or status.state is State.FINISHED:
                continue
            if self._board.stopped(rank) or (status.heartbeat > 0 and _heartbeat_age(status) > _HELD_SECONDS):
                self._board.kill(rank)

    def _ended_rank(self) -> Fault | None:
        """A rank that died or failed, or that another one has found to hang."""
        board, rank = self._board, self.mesh.rank
        found = find_fault(board, rank)
        if found is not None:
            blamed, sentence = found
            return Fault(blamed, sentence, hang=not has_ended(board, blamed))
        own = board[rank]
        if own.state is State.FAILED:
            return Fault(rank, f"{fault_sentence(own, 'failed')} Its error was:\n{own.error}", hang=False)
        return None

    def _is_left_alone(self) -> bool:
        """Whether this rank, the only one, has an error that the user may handle, or stands in a debugger."""
        if main_is_debugged():
            self._since = [time.monotonic()]
        return self.mesh.page.state in (State.FAILED, State.FINISHED) or main_is_debugged()

    def _silent_seconds(self) -> float:
        """Seconds since the last progress of any rank, as far as this process could have seen some."""
        now = time.monotonic()
        unseen = now - self._looked
        if unseen > _HELD_SECONDS:  # this process itself was stopped or held: that tells nothing of the others
            self._since = [since + unseen for since in self._since]
        self._looked = now
        for rank, page in enumerate(self._board.pages):
            if page.progress != self._progress[rank]:
                self._progress[rank], self._since[rank] = page.progress, now
        return now - max(self._since)

    def _hang(self, silent: float) -> Fault | None:
        """Finds the rank for which all others wait; None while that is not certain, or the start may take longer."""
        board = self._board
        there = [rank for rank in range(len(board)) if board.pages[rank].state is not State.FINISHED]
        stopped = [rank for rank in there if board.stopped(rank)]
        if stopped:
            return Fault(stopped[0], self._stopped(board[stopped[0]]), hang=True)
        if silent < self._start_timeout and any(board.pages[rank].state is State.STARTING for rank in there):
            return None
        statuses = {rank: board[rank] for rank in there}
        ages = {rank: _heartbeat_age(status) for rank, status in statuses.items()}
        oldest = max(ages, key=lambda rank: ages[rank], default=None)
        if oldest is not None and ages[oldest] > _LATE_SECONDS:
            return Fault(oldest, _held(statuses[oldest], ages[oldest]), True) if ages[oldest] > _HELD_SECONDS else None
        return self._waited_for(statuses, silent)

    def _waited_for(self, statuses: dict[int, Status], silent: float) -> Fault:
        """The rank for which others wait, all of which run."""
        loading = [rank for rank, status in statuses.items() if status.loading]
        busy = [rank for rank, status in statuses.items() if not status.waits]
        if loading:
            rank = min(loading, key=lambda each: self._since[each])
            return Fault(rank, self._waits_for_data(statuses[rank], silent), hang=True)
        if busy:
            rank = min(busy, key=lambda each: self._since[each])
            return Fault(rank, fault_sentence(statuses[rank], f"made no progress for {silent:.0f} s"), hang=True)
        waiting = "; ".join(fault_sentence(status, "waits")[:-1] for status in statuses.values())
        return Fault(None, f"All ranks wait for each other, for {silent:.0f} s: {waiting}.", hang=True)

    def _stopped(self, status: Status) -> str:
        gist = fault_sentence(status, "was stopped")
        return gist if self._is_here(status.rank) else f"{gist} Or it was held: from another host, both look alike."

    def _waits_for_data(self, status: Status, silent: float) -> str:
        gist = fault_sentence(status, f"waits for its data loader, for {silent:.0f} s,")
        stopped = stopped_descendants(status.pid) if self._is_here(status.rank) else []
        if not stopped:
            return gist
        if len(stopped) == 1:
            return f"{gist} Its worker process {stopped[0]} is stopped."
        return f"{gist} Its worker processes {', '.join(map(str, stopped))} are stopped."

    def _is_here(self, rank: int) -> bool:
        """Whether a rank runs on this host."""
        return self.mesh.locations[rank] == self.mesh.locations[self.mesh.rank]


def _heartbeat_age(status: Status) -> float:
    """Seconds since the process of a rank last got to run, as far as is known."""
    return time.monotonic() - status.heartbeat_time


def _held(status: Status, age: float) -> str:
    gist = fault_sentence(status, f"was held for {age:.0f} s")
    return f"{gist} Some call in it keeps the interpreter's lock (GIL), so that none of its threads gets to run."
