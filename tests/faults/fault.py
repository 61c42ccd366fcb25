"""What may happen to a rank: which fault, on which rank, at which place, in which step."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tests.hosts import cut

INJECTED = "injected"
"""The file in the job's folder that tells when the fault came, in seconds of ``time.monotonic()``."""

PLACES = (
    "start",  # before the Trainer exists
    "build",  # while the rank builds its half
    "train",  # inside `encode` on encoder ranks, inside `loss` on backbone ranks
    "wait",  # while the rank waits for another one, which is slow in that step
    "between",  # in a callback after a step
    "validation",  # as "train", in a validation step
    "save",  # while the rank flushes a file of a checkpoint to the disk
    "load",  # while the rank changes an image that it loads; the step counts as many images as a step has samples
    "anywhere",  # so many calls of functions after the first step
)


@dataclass(frozen=True)
class Fault:
    """A fault that a rank inflicts upon itself.

    Attributes:
        kind: ``"kill"`` and ``"stop"`` (signals), ``"kill late"`` (when others wait for the rank already), ``"raise"``
            and ``"exit"`` (Python exceptions), ``"raise twice"`` (a callback that hears of the first exception raises
            another one), ``"vanish"`` (the process ends at once with exit code 0, ``os._exit``), ``"loop"`` and
            ``"sleep"`` (no end), ``"hold"`` (no end, and no other thread of the process gets to run), ``"kill worker"``
            and ``"stop worker"`` (a process that loads data for the rank), ``"stop starter"`` (the process that has
            started the rank), ``"full disk"`` and ``"no memory"`` (the system says so), ``"wrong data"`` (somebody
            writes the training file anew), ``"clock jump"`` (the wall clock is set on by a day), ``"lost network"``
            (nothing passes between the two hosts any more), ``"lost node"`` (everything that torchrun has started on
            this node is killed, and torchrun itself).
        rank: the global rank that breaks.
        place: one of ``PLACES``.
        step: ``trainer.global_step`` at that moment, where there is one.
        calls: how many functions the rank has called or left by then, where it may happen anywhere.
    """

    kind: str
    rank: int
    place: str
    step: int = 0
    calls: int = 0

    def is_due(self, rank: int, place: str, step: int) -> bool:
        """Whether it is to happen here and now. A fault happens at the first chance from its step on."""
        return (rank, place) == (self.rank, self.place) and step >= self.step

    def happen(self, folder: Path) -> None:
        """Break this process."""
        if self.kind == "kill late":
            time.sleep(1.0)
        (folder / INJECTED).write_text(str(time.monotonic()))
        if self.kind in ("kill", "kill late", "stop"):
            os.kill(os.getpid(), signal.SIGSTOP if self.kind == "stop" else signal.SIGKILL)
            time.sleep(600)  # the signal may come a moment later; and after a stop nobody continues this process
        elif self.kind in ("raise", "raise twice"):
            raise ValueError("a fault of the test")
        elif self.kind == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.kind == "no memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        elif self.kind == "wrong data":
            records = folder / "data" / "train.jsonl"
            records.write_text(records.read_text().replace("what?", "what now?"))
        elif self.kind == "clock jump":
            clock = time.time
            time.time = lambda: clock() + 86400.0
        elif self.kind == "lost network":
            cut(json.loads(os.environ["SETTINGS"])["hosts"])
        elif self.kind == "lost node":
            torchrun = psutil.Process(os.getppid())
            others = [process for process in torchrun.children(recursive=True) if process.pid != os.getpid()]
            for process in (torchrun, *others, psutil.Process()):
                process.kill()
            time.sleep(600)
        elif self.kind == "exit":
            sys.exit(0)
        elif self.kind == "vanish":
            os._exit(0)
        elif self.kind == "sleep":
            time.sleep(600)
        elif self.kind == "hold":
            ctypes.PyDLL(None).sleep(600)  # as an extension in C does that never releases the interpreter's lock
        elif self.kind in ("kill worker", "stop worker"):
            for worker in multiprocessing.active_children():
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL if self.kind == "kill worker" else signal.SIGSTOP)
        elif self.kind == "stop starter":
            os.kill(os.getppid(), signal.SIGSTOP)
        while self.kind == "loop":
            pass
