"""A small process beside a job of one rank, which ends it where a call keeps the interpreter's lock for ever.

With several ranks the others see that one no longer shows signs of life. A single one has nobody else: none of its
threads gets to run. So its monitor writes to a pipe, and who reads that runs this file as a script, which imports
nothing but a few modules of Python's own, and ends with the process that it guards.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_DUMP = signal.SIGRTMAX - 3
"""At which the guarded process writes the stacks of its threads, for which it needs no lock."""
_LOOK_SECONDS = 1.0
_LAST_SECONDS = 1.0
"""In which stacks come."""
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


class LockGuard:
    """Guards this process, from the first beat on.

    Args:
        rank: the calling rank.
        folder: where ``fault-rank<rank>.txt`` is written.

    Raises:
        OSError: the system lets no process begin.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(rank), str(folder)]
        try:
            self._process = subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        faulthandler.register(_DUMP, self._pipe)

    def beat(self, seconds: float, sentence: str) -> None:
        """Say that this process still gets to run.

        Args:
            seconds: after which it is ended if nothing more comes; infinite where it may take as long as it likes.
            sentence: to be said then, one line.
        """
        with suppress(OSError):  # the guard reads slowly, or somebody has ended it
            os.write(self._pipe, f"{seconds}\t{sentence}\n".encode(errors="replace"))

    def close(self) -> None:
        """Guard no longer."""
        os.close(self._pipe)
        self._process.wait()
        faulthandler.unregister(_DUMP)  # at last: without a handler that signal would end this process


def main() -> None:
    """Guard the process that has started this one. Arguments: its number, its rank, the folder for its fault file."""
    pid, rank, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the process that it guards
        signal.signal(number, signal.SIG_IGN)
    seconds, sentence, silent = math.inf, "", 0.0
    while os.getppid() == pid:
        began = time.monotonic()
        if select.select([0], [], [], _LOOK_SECONDS)[0]:
            said = os.read(0, 1 << 16)
            if not said:
                return
            seconds, sentence = _last_beat(said, (seconds, sentence))
            silent = 0.0
        elif not _is_stopped(pid):  # time in which this process was stopped itself does not count
            silent += min(time.monotonic() - began, 2 * _LOOK_SECONDS)
        if silent >= seconds and os.getppid() == pid:
            _end(pid, rank, folder, sentence)
            return


def _last_beat(said: bytes, former: tuple[float, str]) -> tuple[float, str]:
    """Reads the last whole line."""
    for line in reversed(said.decode(errors="replace").split("\n")[:-1]):
        seconds, tab, sentence = line.partition("\t")
        with suppress(ValueError):
            return (float(seconds), sentence) if tab else former
    return former


def _end(pid: int, rank: str, folder: Path, sentence: str) -> None:
    os.kill(pid, _DUMP)
    deadline, stacks = time.monotonic() + _LAST_SECONDS, b""
    while (left := deadline - time.monotonic()) > 0 and select.select([0], [], [], left)[0]:
        part = os.read(0, 1 << 16)
        if not part:
            break
        stacks += part
    text = f"{sentence}\nThe threads of rank {rank} were at:\n{stacks.decode(errors='replace')}"
    file = folder / f"fault-rank{rank}.txt"
    with suppress(OSError):
        print(f"\nflowtrain: {text}\nflowtrain: rank {rank} ends. {sentence} See {file}.", file=sys.stderr, flush=True)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.replace(file)
    os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Whether a process lives but is stopped, by SIGSTOP or by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    main()
