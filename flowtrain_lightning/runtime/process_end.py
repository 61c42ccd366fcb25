"""Ends a process of a job: with a sentence on the screen and in a file, its children gone, and at once."""

from __future__ import annotations

import atexit
import ctypes
import math
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from flowtrain_lightning.runtime.process_tree import descendants

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)

_TIE = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_SET_PARENT_DEATH_SIGNAL}, ctypes.c_ulong({int(signal.SIGKILL)}), 0, 0, 0)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

_last_words = ""
"""The cause that ends this process, in one line; empty while there is none."""


def say_fault(text: str, folder: str | os.PathLike[str], rank: int) -> None:
    """Print the text to stderr, and put it whole or not at all into ``fault-rank<rank>.txt``.

    When the process ends, its gist is printed once more: what a person sees last is the cause, and no library's words.

    Args:
        text: rank, role, phase and cause, in its first line; the error's own text may follow.
        folder: where the file goes.
        rank: the calling rank.
    """
    global _last_words
    file = Path(folder) / f"fault-rank{rank}.txt"
    with suppress(OSError, ValueError):  # where it cannot be said it must still end
        print(f"\nflowtrain: {text}", file=sys.stderr, flush=True)
    _last_words = f"flowtrain: rank {rank} ends. {_gist(text)} See {file}."
    unfinished = file.with_suffix(".unfinished")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text + "\n")
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)


def remove_faults(folder: str | os.PathLike[str], first: int = 0, end: int | None = None) -> None:
    """Remove the files of an earlier run that failed: those in the folder are of the run that was started last.

    Args:
        folder: where they lie.
        first: the first rank whose file goes.
        end: the rank after the last one; None for all that follow.
    """
    for file in Path(folder).glob("fault-rank*"):
        found = re.fullmatch(r"fault-rank(\d+)\.(txt|unfinished)", file.name)
        if found is not None and first <= int(found[1]) < (math.inf if end is None else end):
            with suppress(OSError):  # of another user, say: the run itself needs none of them
                file.unlink()


def _gist(text: str) -> str:
    """The first line of a text, and the line that names the error if one is told."""
    first, *others = text.strip().splitlines()
    named = [line for line in others if line[:1].strip() and not line.startswith(("Traceback", "The main thread"))]
    return " ".join([first.removesuffix(" Its error was:"), *named[-1:]])


def end_at_once(code: int = 1) -> NoReturn:
    """End this process with its last words, and without what the interpreter and its libraries do at their end."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        if _last_words:
            os.write(2, f"\n{_last_words}\n".encode(errors="replace"))  # in one piece, among those of other ranks
    os._exit(code)


@atexit.register
def _end_after_fault() -> None:
    """After a fault: the interpreter and its libraries may need more time to end in good order than there is."""
    if _last_words:
        end_at_once()


def end_children(spared: Collection[int] = ()) -> None:
    """Kill the processes that descend from this one, but for ``spared``: ranks, which end by themselves."""
    for child in descendants(os.getpid(), spared):
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


def tied_to_this_process(command: Sequence[str]) -> list[str]:
    """A command that does the same, and which the system kills when the thread that starts it ends.

    A new interpreter that loads PyTorch on a busy machine needs a minute before it can look for its parent itself.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def outlive_parent() -> None:
    """From now on the end of this process's parent is no longer its own end."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(0), 0, 0, 0)
