"""Who of the job is alive and who is to blame: one monitor per process, from its first start to its last exit.

Three times follow one another. While ranks start, each process knows only those that it started, or that started it
(and on several nodes what `StartBeats` hears). Once all are connected, everyone reads everyone's status page. After
`fit` processes are watched again until they end. In each of them a fault ends this process within seconds, and its last
words say which rank is to blame, and why.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from flowtrain_lightning.pool import Mesh, State, fault_sentence, find_fault, has_ended
from flowtrain_lightning.runtime.main_thread import main_stack, main_waits_for_ranks
from flowtrain_lightning.runtime.process_end import end_at_once, end_children, outlive_parent, say_fault
from flowtrain_lightning.runtime.start_beats import StartBeats

LAUNCHER = "FLOWTRAIN_LAUNCHER"
"""Environment variable of the ranks that the first one of a node has started: its process id."""

_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 3.0  # in which the main thread may leave by itself
_TELL_SECONDS = 1.0  # until a stopped rank is killed: by then the other ranks have seen what is wrong with it, too
_HEARTBEAT_SECONDS = 5.0  # without a heartbeat: not even the monitor of that process gets to run


class HealthMonitor:
    """A thread that ends this process, with a sentence, when the job cannot go on. Get it with `process_health`."""

    def __init__(self) -> None:
        self._rank = 0
        self._folder = Path()
        self._labels: Sequence[str] = ()
        self._processes: dict[int, Callable[[], int | None]] = {}
        self._needs_others = False
        self._joined: _JoinedRanks | None = None
        self._tell_nodes: Callable[[str], None] | None = None
        self._leaving = threading.Event()
        self._looked = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- while ranks start, and after a run ---------------------------------------------------------------------

    def watch_processes(self, rank: int, exit_codes: Mapping[int, Callable[[], int | None]]) -> None:
        """From now on, look after these processes.

        Args:
            rank: the calling rank.
            exit_codes: for each rank a function that gives its exit code once it has ended, and None before.
        """
        self._rank = rank
        self._processes |= exit_codes
        self._start()

    def watch_launcher(self, rank: int, first: int) -> None:
        """From now on, look after ``first``, the first rank of this node, if it started this process."""
        launcher = int(os.environ.get(LAUNCHER, os.getpid()))
        if launcher != os.getpid():
            self.watch_processes(rank, {first: lambda: None if os.getppid() == launcher else 0})
            outlive_parent()  # to say what became of it

    @contextmanager
    def starting(self, folder: Path, rank: int, ranks: int, store: Store | None = None) -> Iterator[None]:
        """Inside, this rank needs the others, and its process ends when one of them does.

        Args:
            folder: where ``fault-rank<rank>.txt`` is written.
            rank: the calling rank.
            ranks: of the job.
            store: of a job on several nodes, through which they hear of each other.
        """
        self._rank, self._folder, self._needs_others = rank, folder, True
        if store is None:
            yield
            return
        with StartBeats(store, rank, ranks, folder) as beats:
            self._tell_nodes = beats.tell
            try:
                yield
            finally:
                self._tell_nodes = None

    def name_ranks(self, labels: Sequence[str]) -> None:
        """What each rank is, for messages."""
        self._labels = labels

    def rest(self) -> None:
        """The run is over: others may end in good order."""
        self._needs_others = False

    # ---- while ranks are connected ------------------------------------------------------------------------------

    def join(self, mesh: Mesh, hang_timeout: float, start_timeout: float, folder: Path) -> None:
        """From now on, watch all ranks. With a single one there is nobody to watch, and nobody whom its end frees.

        Args:
            mesh: connects the ranks.
            hang_timeout: seconds without progress of any rank after which all end. Must exceed the longest time in
                which no rank enters a phase: a slow first step, or writing a checkpoint.
            start_timeout: the same until every rank has begun its first step: preparing data and building the model
                may take long.
            folder: where ``fault-rank<rank>.txt`` is written.
        """
        self._rank, self._folder, self._labels, self._needs_others = mesh.rank, folder, mesh.labels, False
        if mesh.ranks > 1:
            self._leaving.clear()
            self._looked.clear()
            self._joined = _JoinedRanks(mesh, hang_timeout, max(start_timeout, hang_timeout))
            self._start()

    def leave(self) -> None:
        """Cease to watch, for an orderly end. Where a rank has failed, this one included, the process still ends."""
        self._leaving.set()
        while self._joined is not None and not self._looked.wait(_LOOK_SECONDS):
            pass

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="flowtrain-health", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            if self._joined is None:
                time.sleep(_LOOK_SECONDS)
                self._look_at_processes()
                continue
            leaving = self._leaving.wait(_LOOK_SECONDS)
            fault = self._joined.look()
            if fault is not None:
                self._end(self._joined, fault)
            if leaving:
                self._joined = None
                self._looked.set()

    def _look_at_processes(self) -> None:
        for rank, exit_code in list(self._processes.items()):
            code = exit_code()
            if code is None or self._joined is not None or (code == 0 and not self._needs_others):
                continue
            who = f"Rank {rank} ({self._labels[rank]})" if self._labels else f"Rank {rank}"
            how = f"ended with exit code {code}" if rank > self._rank else "ended"  # nobody tells that of a parent
            when = "during start-up, before it had joined the other ranks" if self._needs_others else "outside of fit"
            sentence = f"{who} {how} {when}. Its own output says why."
            say_fault(sentence, self._folder, self._rank)
            if self._tell_nodes is not None:
                self._tell_nodes(sentence)
            end_children()
            end_at_once()

    def _end(self, joined: _JoinedRanks, fault: Fault) -> None:
        """Say what happened, let the main thread leave by itself, and end the process if it does not."""
        mesh, rank = joined.mesh, self._rank
        page = mesh.page
        text = fault.sentence
        if fault.hang:
            text += f"\nThe main thread of rank {rank} ({mesh.labels[rank]}) was at:\n{main_stack()}"
        if fault.rank == rank:
            page.fail(text)
        elif fault.rank is not None:
            page.blame(fault.rank, fault.sentence)
        say_fault(text, self._folder, rank)
        # Where the interpreter's own end hangs, or something holds its lock, the system ends this process by SIGALRM.
        signal.setitimer(signal.ITIMER_REAL, 2 * _GRACE_SECONDS)
        mesh.abort(fault.sentence, fault.rank)
        deadline = time.monotonic() + _GRACE_SECONDS
        if fault.hang:
            time.sleep(_TELL_SECONDS)
        joined.kill_stopped()
        self._looked.set()
        while time.monotonic() < deadline:
            page.beat()
            time.sleep(_LOOK_SECONDS)
        joined.kill_stopped()
        end_children(spared={page.read().pid for page in mesh.board.pages})
        end_at_once()


@cache
def process_health() -> HealthMonitor:
    """The monitor of this process, whichever Trainer runs; a fork has one of its own."""
    return HealthMonitor()


os.register_at_fork(after_in_child=process_health.cache_clear)


@dataclass(frozen=True)
class Fault:
    """What ends the job.

    Attributes:
        rank: who is to blame, or None when all ranks wait for each other.
        sentence: what happened.
        hang: whether it was found by a lack of progress, so that a stack tells more.
    """

    rank: int | None
    sentence: str
    hang: bool


class _JoinedRanks:
    """The ranks of a connected job: shows this process's heartbeat, and finds who died, failed or hangs."""

    def __init__(self, mesh: Mesh, hang_timeout: float, start_timeout: float) -> None:
        self.mesh = mesh
        self._board = mesh.board
        self._hang_timeout = hang_timeout
        self._start_timeout = start_timeout
        self._progress = [-1] * mesh.ranks
        self._since = [time.monotonic()] * mesh.ranks  # when each rank last made progress

    def look(self) -> Fault | None:
        """What is wrong, if anything."""
        board, rank = self._board, self.mesh.rank
        self.mesh.page.beat()
        self.mesh.page.tell_collective(main_waits_for_ranks())
        found = find_fault(board, rank)
        if found is not None:
            blamed, sentence = found
            return Fault(blamed, sentence, hang=not has_ended(board, blamed))
        own = board[rank]
        if own.state is State.FAILED:
            return Fault(rank, f"{fault_sentence(own, 'failed')} Its error was:\n{own.error}", hang=False)
        silent = self._silent_seconds()
        starting = any(page.state is State.STARTING for page in board.pages)
        return self._hang(silent) if silent >= (self._start_timeout if starting else self._hang_timeout) else None

    def kill_stopped(self) -> None:
        """Kill the peers that cannot end themselves."""
        for rank in range(len(self._board)):
            status = self._board[rank]
            silent = status.heartbeat > 0 and time.monotonic() - status.heartbeat_time > _HEARTBEAT_SECONDS
            stopped = silent or self._board.stopped(rank)
            if rank != self.mesh.rank and status.state is not State.FINISHED and stopped:
                self._board.kill(rank)

    def _silent_seconds(self) -> float:
        """Seconds since the last progress of any rank."""
        now = time.monotonic()
        for rank, page in enumerate(self._board.pages):
            if page.progress != self._progress[rank]:
                self._progress[rank], self._since[rank] = page.progress, now
        return now - max(self._since)

    def _hang(self, silent: float) -> Fault:
        board = self._board
        there = [rank for rank in range(len(board)) if board.pages[rank].state is not State.FINISHED]
        stopped = [rank for rank in there if board.stopped(rank)]
        busy = [rank for rank in there if not board[rank].waits]
        if stopped:
            return Fault(stopped[0], fault_sentence(board[stopped[0]], "was stopped"), hang=True)
        if busy:
            rank = min(busy, key=lambda each: self._since[each])
            return Fault(rank, fault_sentence(board[rank], f"made no progress for {silent:.0f} s"), hang=True)
        waiting = "; ".join(fault_sentence(board[rank], "waits")[:-1] for rank in there)
        return Fault(None, f"All ranks wait for each other, for {silent:.0f} s: {waiting}.", hang=True)
