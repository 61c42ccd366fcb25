"""Ends this process, with a sentence, when a rank of the job died, failed or hangs; and what ends with it."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed import distributed_c10d

from flowtrain_lightning.pool import Mesh, State, fault_sentence, find_fault, first_fault, has_ended

__all__ = ["Watchdog", "die_with_parent", "fault_sentence", "first_fault"]

HANG_SECONDS = 600.0
START_SECONDS = 1800.0
GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 1.0  # until a stopped rank is killed: by then the other ranks have seen what is wrong with it, too
_DEAF_SECONDS = 5.0  # without a heartbeat: not even the watchdog of that process gets to run
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)

_found_fault = threading.Event()
"""The watchdog of this process ends it."""


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


class Watchdog:
    """A thread that watches all ranks of the job, from `start` to `stop`.

    It shows its own process's heartbeat and looks for three faults: a rank whose process died, a rank whose page says
    that it failed, and no progress of any rank for ``hang_timeout`` seconds. Then the lane is woken with `PeerFailed`,
    the main thread has ``GRACE_SECONDS`` to leave by itself, so that the trainer's clean-up runs, and after that the
    process ends with code 1. Ranks that could not end themselves (stopped, or without heartbeat) are killed.

    A rank that stops making progress ends itself: an endless loop in Python still lets this thread run.

    Args:
        mesh: connects the ranks.
        rank: the calling rank.
        labels: what each rank is, for example ``"encoder 0"``.
        hang_timeout: seconds. Must exceed the longest time in which no rank enters a phase or advances: a slow first
            step, or writing a checkpoint.
        start_timeout: the same until every rank has begun its first step: preparing data and building the model may
            take long.
        fault_dir: where ``fault-rank<rank>.txt`` is written.
        kill_children: also end this process's own children (workers that load data) when it ends the process.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        labels: Sequence[str],
        hang_timeout: float = HANG_SECONDS,
        start_timeout: float = START_SECONDS,
        fault_dir: str | os.PathLike[str] = ".",
        kill_children: bool = True,
    ) -> None:
        self._mesh = mesh
        self._board = mesh.board
        self._rank = rank
        self._labels = tuple(labels)
        self._hang_timeout = hang_timeout
        self._start_timeout = max(start_timeout, hang_timeout)
        self._fault_dir = fault_dir
        self._kill_children = kill_children
        self._stop = threading.Event()
        self._found = threading.Event()  # and said, and those killed who cannot end by themselves
        self._thread = threading.Thread(target=self._watch, name="flowtrain-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch. With a single rank there is nobody to watch, and nobody whom its end would free."""
        if len(self._board) > 1:
            self._thread.start()

    def stop(self) -> None:
        """Cease to watch, for an orderly end. Where a rank has failed, this one included, the process still ends."""
        self._stop.set()
        if self._thread.ident is None:
            return
        while self._thread.is_alive() and not self._found.is_set():
            self._thread.join(_LOOK_SECONDS)

    def _watch(self) -> None:
        page = self._board.pages[self._rank]
        patience = _Patience(len(self._board))
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_LOOK_SECONDS)
            page.beat()
            page.tell_collective(_main_in_collective())
            fault = self._find(patience)
            if fault is not None:
                self._end(fault)

    def _find(self, patience: _Patience) -> Fault | None:
        found = find_fault(self._board, self._rank)
        if found is not None:
            rank, sentence = found
            return Fault(rank, sentence, hang=rank == self._rank or not has_ended(self._board, rank))
        own = self._board[self._rank]
        if own.state is State.FAILED:
            return Fault(self._rank, f"{fault_sentence(own, 'failed')} Its error was:\n{own.error}", hang=False)
        silent = patience.seconds([page.progress for page in self._board.pages])
        starting = any(page.state is State.STARTING for page in self._board.pages)
        limit = self._start_timeout if starting else self._hang_timeout
        return self._hang(patience, silent) if silent >= limit else None

    def _hang(self, patience: _Patience, silent: float) -> Fault:
        there = [rank for rank in range(len(self._board)) if self._board.pages[rank].state is not State.FINISHED]
        stopped = [rank for rank in there if self._board.stopped(rank)]
        busy = [rank for rank in there if not self._board[rank].waits]
        if stopped:
            return Fault(stopped[0], fault_sentence(self._board[stopped[0]], "was stopped"), hang=True)
        if busy:
            rank = min(busy, key=patience.last_progress)
            cause = f"made no progress for {silent:.0f} s"
            return Fault(rank, fault_sentence(self._board[rank], cause), hang=True)
        waiting = "; ".join(fault_sentence(self._board[rank], "waits")[:-1] for rank in there)
        return Fault(None, f"All ranks wait for each other, for {silent:.0f} s: {waiting}.", hang=True)

    def _end(self, fault: Fault) -> None:
        """Say what happened, let the main thread leave by itself, and end the process if it does not."""
        page = self._board.pages[self._rank]
        text = fault.sentence
        if fault.hang:
            text += f"\nThe main thread of rank {self._rank} ({self._labels[self._rank]}) was at:\n{_main_stack()}"
        if fault.rank == self._rank:
            page.fail(text)
        elif fault.rank is not None:
            page.blame(fault.rank, fault.sentence if fault.hang else "")
        say_fault(text, self._fault_dir, self._rank)
        _found_fault.set()
        # Where the interpreter's own end hangs, or something holds its lock, the system ends this process by SIGALRM.
        signal.setitimer(signal.ITIMER_REAL, 2 * GRACE_SECONDS)
        self._mesh.abort(fault.sentence, fault.rank)
        end = time.monotonic() + GRACE_SECONDS
        if fault.hang:
            time.sleep(_TELL_SECONDS)
        self._kill_deaf()
        self._found.set()
        while time.monotonic() < end:
            page.beat()
            time.sleep(_LOOK_SECONDS)
        self._kill_deaf()
        if self._kill_children:
            end_children(spared={page.read().pid for page in self._board.pages})
        os._exit(1)

    def _kill_deaf(self) -> None:
        """Kill the peers that cannot end themselves."""
        for rank in range(len(self._board)):
            status = self._board[rank]
            deaf = status.heartbeat > 0 and time.monotonic() - status.heartbeat_time > _DEAF_SECONDS
            if rank != self._rank and status.state is not State.FINISHED and (deaf or self._board.stopped(rank)):
                self._board.kill(rank)


class _Patience:
    """Since when which rank has made no progress."""

    def __init__(self, ranks: int) -> None:
        self._counts = [-1] * ranks
        self._since = [time.monotonic()] * ranks

    def seconds(self, counts: Sequence[int]) -> float:
        """Seconds since the last progress of any rank, now that the ranks count ``counts``."""
        now = time.monotonic()
        for rank, count in enumerate(counts):
            if count != self._counts[rank]:
                self._counts[rank], self._since[rank] = count, now
        return now - max(self._since)

    def last_progress(self, rank: int) -> float:
        """When ``rank`` last made progress."""
        return self._since[rank]


@atexit.register
def _leave_at_once() -> None:
    """After a fault: the interpreter and its libraries may need more time to end in good order than there is."""
    if _found_fault.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def say_fault(text: str, folder: str | os.PathLike[str], rank: int) -> None:
    """Print the text to stderr, and put it whole or not at all into ``fault-rank<rank>.txt``.

    Args:
        text: rank, role, phase and cause.
        folder: where the file goes.
        rank: the calling rank.
    """
    with suppress(OSError, ValueError):  # where it cannot be said it must still end
        print(f"\nflowtrain: {text}", file=sys.stderr, flush=True)
    file = Path(folder) / f"fault-rank{rank}.txt"
    unfinished = file.with_suffix(".unfinished")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text + "\n")
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)


def end_children(spared: Collection[int] = ()) -> None:
    """Kill the processes that descend from this one, but for ``spared``: ranks, which end by themselves."""
    parents = _parents()
    heirs = [os.getpid()]
    for parent in heirs:
        heirs.extend(child for child, of in parents.items() if of == parent and child not in spared)
    for child in heirs[1:]:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)


def die_with_parent(worker_id: int = 0, *, parent: int | None = None) -> None:
    """Let the system kill this process when the thread that started it ends. Usable as a ``worker_init_fn``.

    Args:
        worker_id: not used; a data loader passes it.
        parent: the process that started this one, where it is known: if it has died already, this process ends now.
            Processes of `multiprocessing` know it by themselves.
    """
    if parent is None:
        starter = multiprocessing.parent_process()
        parent = os.getppid() if starter is None else starter.pid
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "The system refused to tie this process to its parent (prctl).")
    if os.getppid() != parent:
        os._exit(1)


def _main_frame() -> FrameType | None:
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def _main_in_collective() -> bool:
    """Whether the main thread waits in a collective that Lightning or the user has called."""
    frame = _main_frame()
    return frame is not None and frame.f_code.co_filename == distributed_c10d.__file__


def _main_stack() -> str:
    frame = _main_frame()
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)\n"


def _parents() -> dict[int, int]:
    """The parent of every process that can be seen."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # it ended while we looked
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents
