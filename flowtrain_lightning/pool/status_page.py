"""A rank's status: a page of shared memory that every rank of its host can read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap
from pathlib import Path

from flowtrain_lightning.pool.shared_memory import create_memory, map_memory

PAGE_BYTES = 32 * 1024
_TEXT_BYTES = 256  # of a label or a phase
_ERROR_BYTES = 16 * 1024
_FLAGS, _EXITING = 5, 0x4  # among what the kernel says of a process behind its state; PF_EXITING of the kernel

# Words of 64 bits, counted from the page's start. Each is stored whole, so a reader never sees half of one.
_PID, _STATE, _STEP, _PROGRESS, _HEARTBEAT, _HEARTBEAT_TIME, _SIGTERM, _BLAMES, _FAILED_TIME = range(9)
_LABEL_LENGTH, _PHASE_LENGTH, _ERROR_LENGTH, _VERSION, _IN_COLLECTIVE, _BEGUN, _LOADING = range(9, 16)
# Texts, in bytes from the page's start.
_LABEL, _PHASE, _ERROR = 1024, 2048, 4096


class State(IntEnum):
    """The state of a rank."""

    STARTING = 0
    """It has not begun its first step yet."""
    RUNNING = 1
    FINISHED = 2
    """It left in good order; that its process ends is no death."""
    FAILED = 3
    """It met an error, whose text stands in its page."""


@dataclass(frozen=True)
class Status:
    """A rank's page at one moment.

    Attributes:
        rank: whose page it is.
        pid: its process.
        label: for example ``"encoder 0"``.
        state: what has become of it.
        phase: what it does; a phase that waits for others begins with ``"wait"``.
        step: in which step; -1 before the first.
        progress: how often it entered a phase.
        heartbeat: how often its health monitor looked around.
        heartbeat_time: when it last did, in seconds of ``time.monotonic()``, which all processes share.
        sigterm: whether it was asked to end by SIGTERM.
        blames: the rank that it holds to blame for its own end, or None.
        error: the first error with its traceback, if it failed; if it blames another rank, what is wrong with that one.
        failed_time: when it failed, in seconds of ``time.monotonic()``; 0 unless it did.
        in_collective: whether it is in a collective of ``torch.distributed``, whatever its phase.
        loading: whether its main thread waits for its data loader, whatever its phase.
        begun: how many steps it has begun, of all stages.
        lost: a verb and what belongs to it, when it runs on another host and nothing more will come from it.
    """

    rank: int
    pid: int
    label: str
    state: State
    phase: str
    step: int
    progress: int
    heartbeat: int
    heartbeat_time: float
    sigterm: bool
    blames: int | None
    error: str
    failed_time: float
    in_collective: bool
    loading: bool = False
    begun: int = 0
    lost: str = ""

    @property
    def waits(self) -> bool:
        """Whether it only waits for others."""
        return not self.loading and (self.in_collective or self.phase.startswith("wait"))


class StatusPage:
    """The page of one rank. Only its owner writes; entering a phase costs about a microsecond.

    Args:
        rank: the owner.
        memory: the mapped page, and what follows it.

    Attributes:
        rank: the owner.
        memory: the mapped page, and what follows it.
    """

    def __init__(self, rank: int, memory: mmap) -> None:
        self.rank = rank
        self.memory = memory
        self._words = memoryview(memory)[: 16 * 8].cast("q")
        self._phases: dict[str, bytes] = {}

    @classmethod
    def attach(cls, rank: int, descriptor: int, more_bytes: int = 0) -> StatusPage:
        """Map the page of a peer, and bytes that follow it; closes the descriptor."""
        try:
            return cls(rank, map_memory(descriptor, PAGE_BYTES + more_bytes))
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls, rank: int, label: str, more_bytes: int = 0) -> tuple[StatusPage, int]:
        """Make the calling process's page; the descriptor with it is for peers, and the caller closes it.

        Args:
            rank: the calling rank.
            label: what it is, for messages.
            more_bytes: shared memory for other uses that follows the page.
        """
        descriptor = create_memory(f"flowtrain status of rank {rank}", PAGE_BYTES + more_bytes)
        page = cls(rank, map_memory(descriptor, PAGE_BYTES + more_bytes))
        text = _encoded(label)
        page.memory[_LABEL : _LABEL + len(text)] = text
        page._words[_LABEL_LENGTH] = len(text)
        page._words[_BLAMES] = page._words[_STEP] = -1
        page._words[_PID] = os.getpid()
        page.beat()
        return page, descriptor

    def enter(self, phase: str, step: int) -> None:
        """Say what the rank does from now on. Counts as progress.

        Args:
            phase: a few words; begins with ``"wait"`` where the rank only waits for others.
            step: the step that it belongs to; -1 before the first.
        """
        text = self._phases.get(phase)
        if text is None:
            text = self._remember(phase)
        words = self._words
        words[_VERSION] += 1  # odd while the phase is being changed, so that a reader can tell and look again
        self.memory[_PHASE : _PHASE + len(text)] = text
        words[_PHASE_LENGTH] = len(text)
        words[_STEP] = step
        words[_VERSION] += 1
        words[_PROGRESS] += 1
        if words[_STATE] == State.STARTING and step >= 0:
            words[_STATE] = State.RUNNING

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, the rank is in this phase of its present step; after a good end it is in the former phase again."""
        former = self.read()
        self.enter(phase, former.step)
        yield
        self.enter(former.phase, former.step)

    def begin_step(self) -> None:
        """Count a step, of whatever stage: all ranks begin the same ones in the same order."""
        self._words[_BEGUN] += 1

    def fail(self, text: str) -> None:
        """Say that this rank itself is to blame for the job's end. The first text stays.

        Nothing happens where the rank already blames another one: what fails then is a consequence.

        Args:
            text: the error with its traceback. When it is too long its end is kept, where the error stands.
        """
        if self._words[_STATE] == State.FAILED or self._words[_BLAMES] >= 0:
            return
        self._write_error(text)
        self._words[_FAILED_TIME] = time.monotonic_ns()
        self._words[_STATE] = State.FAILED

    def blame(self, rank: int, sentence: str = "") -> None:
        """Say that this rank ends because of another one, so that nobody takes its end for the first fault.

        Args:
            rank: who is to blame.
            sentence: what is wrong with it, since others may not see that, or not yet: one that is stopped is killed
                soon, and a host is not lost to all ranks at the same moment.
        """
        if self._words[_BLAMES] < 0 and rank != self.rank:
            if self._words[_STATE] != State.FAILED:  # then its own error stands there
                self._write_error(sentence)
            self._words[_BLAMES] = rank

    def finish(self) -> None:
        """Say that this rank has done its work; a rank that failed stays failed."""
        if self._words[_STATE] != State.FAILED:
            self._words[_STATE] = State.FINISHED

    def beat(self) -> None:
        """Say that this process still gets to run."""
        self._words[_HEARTBEAT_TIME] = time.monotonic_ns()
        self._words[_HEARTBEAT] += 1

    def tell_main_thread(self, *, in_collective: bool = False, loading: bool = False) -> None:
        """Say what the main thread waits for, where nobody could enter a phase for it. Counts as no progress.

        Args:
            in_collective: for other ranks, in a collective.
            loading: for its own data loader.
        """
        self._words[_IN_COLLECTIVE] = int(in_collective)
        self._words[_LOADING] = int(loading)

    @property
    def sigterm(self) -> bool:
        """Whether this rank was asked to end by SIGTERM."""
        return bool(self._words[_SIGTERM])

    @sigterm.setter
    def sigterm(self, received: bool) -> None:
        self._words[_SIGTERM] = int(received)

    @property
    def state(self) -> State:
        """The state of the rank; cheaper than a whole `Status`."""
        state = self._words[_STATE]
        return State(state) if 0 <= state <= State.FAILED else State.FAILED

    @property
    def progress(self) -> int:
        """The count of phases that the rank entered; cheaper than a whole `Status`."""
        return self._words[_PROGRESS]

    def read(self) -> Status:
        """A snapshot of the page."""
        words = self._words
        for _ in range(100):  # bounded: its owner may have been killed while it changed its phase
            version = words[_VERSION]
            phase, step = self._text(_PHASE, _PHASE_LENGTH, _TEXT_BYTES), words[_STEP]
            if version % 2 == 0 and version == words[_VERSION]:
                break
        return Status(
            rank=self.rank,
            pid=words[_PID],
            label=self._text(_LABEL, _LABEL_LENGTH, _TEXT_BYTES),
            state=self.state,
            phase=phase,
            step=step,
            progress=words[_PROGRESS],
            heartbeat=words[_HEARTBEAT],
            heartbeat_time=words[_HEARTBEAT_TIME] / 1e9,
            sigterm=self.sigterm,
            blames=words[_BLAMES] if words[_BLAMES] >= 0 else None,
            error=self._text(_ERROR, _ERROR_LENGTH, _ERROR_BYTES),
            failed_time=words[_FAILED_TIME] / 1e9,
            in_collective=bool(words[_IN_COLLECTIVE]),
            loading=bool(words[_LOADING]),
            begun=words[_BEGUN],
        )

    def stopped(self) -> bool:
        """Whether its process is stopped, by SIGSTOP or by a debugger."""
        return is_stopped(self._words[_PID])

    def ending(self) -> bool:
        """Whether the system takes its process apart: connections are closed by then, but it does not count as gone."""
        return is_ending(self._words[_PID])

    def _text(self, start: int, length: int, limit: int) -> str:
        nbytes = min(max(self._words[length], 0), limit)
        return self.memory[start : start + nbytes].decode(errors="replace")

    def _write_error(self, text: str) -> None:
        error = text.encode(errors="replace")[-_ERROR_BYTES:]
        self.memory[_ERROR : _ERROR + len(error)] = error
        self._words[_ERROR_LENGTH] = len(error)

    def _remember(self, phase: str) -> bytes:
        if len(self._phases) >= 1024:
            self._phases.clear()  # phases that carry a number would fill it for ever
        return self._phases.setdefault(phase, _encoded(phase))


def is_stopped(pid: int) -> bool:
    """Whether a process of this host lives but is stopped, by SIGSTOP or by a debugger."""
    return _stat(pid)[:1] in (["T"], ["t"])


def is_ending(pid: int) -> bool:
    """Whether a process of this host is on its way out, after SIGKILL say; on a busy machine that takes seconds."""
    state, *others = _stat(pid) or ["X"]
    return state in "ZX" or bool(int(others[_FLAGS]) & _EXITING)


def _stat(pid: int) -> list[str]:
    """Reads the kernel's line about a process, from its state on; empty where there is none of this number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")[:_TEXT_BYTES]
