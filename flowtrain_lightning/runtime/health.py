"""Finds who of the job is alive and who is to blame: one monitor per process, from its first start to its last exit.

Three times follow one another. While ranks start, each process knows only those that it started, or that started it
(and on several nodes what `StartBeats` hears). Once all are connected, everyone reads everyone's status page. After
`fit` processes are watched again until they end. In each of them a fault ends this process within seconds, and its last
words say which rank is to blame, and why.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from flowtrain_lightning.pool import Mesh
from flowtrain_lightning.runtime.joined_ranks import Fault, JoinedRanks
from flowtrain_lightning.runtime.lock_guard import LockGuard
from flowtrain_lightning.runtime.main_thread import loading_stack, main_stack
from flowtrain_lightning.runtime.process_end import end_at_once, end_children, outlive_parent, remove_faults, say_fault
from flowtrain_lightning.runtime.start_beats import StartBeats
from flowtrain_lightning.runtime.watched_process import WatchedProcess, parent_process

LAUNCHER = "FLOWTRAIN_LAUNCHER"
"""Environment variable of the ranks that the first one of a node has started: its process id."""

_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 3.0  # in which the main thread may leave by itself
_UNGUARDED_SECONDS = 3.0  # in which most runs of a test are over, and a process beside them would not pay
_TELL_SECONDS = 1.0  # until a stopped rank is killed: by then the other ranks have seen what is wrong with it, too


class HealthMonitor:
    """A thread that ends this process, with a sentence, when the job cannot go on. Get it with `process_health`."""

    def __init__(self) -> None:
        self._rank = 0
        self._folder = Path()
        self._labels: Sequence[str] = ()
        self._processes: dict[int, WatchedProcess] = {}
        self._needs_others = False
        self._hang_timeout = math.inf
        self._joined: JoinedRanks | None = None
        self._guard: LockGuard | None = None
        self._guard_from = math.inf
        self._tell_nodes: Callable[[str], None] | None = None
        self._joining = threading.Event()
        self._leaving = threading.Event()
        self._looked = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- while ranks start, and after a run ---------------------------------------------------------------------

    def watch_processes(self, rank: int, processes: Mapping[int, WatchedProcess]) -> None:
        """From now on, look after these processes, by rank; ``rank`` is the calling one."""
        self._rank = rank
        self._processes |= processes
        self._start()

    def watch_launcher(self, rank: int, first: int) -> None:
        """From now on, look after ``first``, the first rank of this node, if it started this process."""
        launcher = int(os.environ.get(LAUNCHER, os.getpid()))
        if launcher != os.getpid():
            self.watch_processes(rank, {first: parent_process(launcher)})
            outlive_parent()  # to say what became of it

    @contextmanager
    def starting(
        self, folder: Path, rank: int, ranks: int, hang_timeout: float, store: Store | None = None
    ) -> Iterator[None]:
        """Inside, this rank needs the others, and its process ends when one of them does. Removes former fault files.

        Args:
            folder: where ``fault-rank<rank>.txt`` is written.
            rank: the calling rank.
            ranks: of the job.
            hang_timeout: seconds for which a process may be stopped.
            store: of a job whose ranks nobody has started who looks after them, through which they hear of each other.
        """
        self._rank, self._folder, self._needs_others, self._hang_timeout = rank, folder, True, hang_timeout
        remove_faults(folder, rank, rank + 1)  # others may have failed by now, and said so
        if rank == 0:
            remove_faults(folder, ranks)
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
        """The roles of each rank, for messages."""
        self._labels = labels

    def rest(self) -> None:
        """The run is over: others may end in good order."""
        self._needs_others = False

    # ---- while ranks are connected ------------------------------------------------------------------------------

    def join(self, mesh: Mesh, hang_timeout: float, start_timeout: float, folder: Path) -> None:
        """From now on, watch all ranks; a single one for hangs alone.

        Args:
            mesh: connects the ranks.
            hang_timeout: seconds without progress of any rank after which all end. Must exceed the longest time in
                which no rank enters a phase: a slow first step, or writing a checkpoint.
            start_timeout: the same until every rank has begun its first step: preparing data and building the model
                may take long.
            folder: where ``fault-rank<rank>.txt`` is written.
        """
        self._rank, self._folder, self._labels, self._needs_others = mesh.rank, folder, mesh.labels, False
        self._leaving.clear()
        self._looked.clear()
        self._guard_from = time.monotonic() + _UNGUARDED_SECONDS if mesh.ranks == 1 else math.inf
        self._joined = JoinedRanks(mesh, hang_timeout, max(start_timeout, hang_timeout))
        self._joining.set()
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
                self._joining.wait(_LOOK_SECONDS)
                self._joining.clear()
                self._look_at_processes()
                continue
            leaving = self._leaving.wait(_LOOK_SECONDS)
            fault = self._joined.look()
            if fault is not None:
                self._end(self._joined, fault)
            if leaving:
                self._end_guard()
                self._joined = None
                self._looked.set()
            elif time.monotonic() >= self._guard_from:
                self._guard_lock(self._joined)

    def _guard_lock(self, joined: JoinedRanks) -> None:
        """Show a single rank's heartbeat to a process outside, which ends it where nothing within can."""
        if self._guard is None:
            try:
                self._guard = LockGuard(self._rank, self._folder)
            except OSError:  # no process or file is left: the run itself may need none
                self._guard_from = math.inf
                return
        self._guard.beat(*joined.held_alone())

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _look_at_processes(self) -> None:
        for rank, process in list(self._processes.items()):
            code, stopped = process.exit_code(), process.stopped_seconds()
            if self._joined is not None:
                return
            if code is not None and (code != 0 or self._needs_others):
                how = f"ended with exit code {code}" if rank > self._rank else "ended"  # nobody tells that of a parent
                self._end_start(rank, how, "Its own output says why.")
            elif self._needs_others and stopped >= self._hang_timeout:
                self._end_start(rank, "was stopped", f"It has not run for {stopped:.0f} s.")

    def _end_start(self, rank: int, how: str, why: str) -> None:
        """Say what has become of a rank that is not connected, and end this process."""
        who = f"Rank {rank} ({self._labels[rank]})" if self._labels else f"Rank {rank}"
        when = "during start-up, before it had joined the other ranks" if self._needs_others else "outside of fit"
        sentence = f"{who} {how} {when}. {why}"
        say_fault(sentence, self._folder, self._rank)
        if self._tell_nodes is not None:
            self._tell_nodes(sentence)
        if rank < self._rank:
            time.sleep(_TELL_SECONDS)  # its other children look for themselves
            self._processes[rank].kill()
        end_children()
        end_at_once()

    def _end(self, joined: JoinedRanks, fault: Fault) -> None:
        """Say what happened, let the main thread leave by itself, and end the process if it does not."""
        self._end_guard()
        mesh, rank = joined.mesh, self._rank
        page = mesh.page
        text = fault.sentence
        if fault.hang:
            text += f"\nThe main thread of rank {rank} ({mesh.labels[rank]}) was at:\n{main_stack()}"
            if fault.rank == rank and page.read().loading:
                text += f"The thread that loads its data was at:\n{loading_stack()}"
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
