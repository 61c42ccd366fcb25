"""Runs a function in several real processes with a deadline, and leaves none of them behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_FORK = multiprocessing.get_context("fork")  # 0.1 s; a fresh interpreter takes seconds to import torch


@dataclass(frozen=True)
class RankResult:
    """How one rank's process ended: ``code`` is negative for a signal, None while it runs."""

    rank: int
    code: int | None
    out: str
    err: str

    def __str__(self) -> str:
        return f"--- rank {self.rank}: exit {self.code}\n{self.out}\n{self.err}"


class Ranks:
    """Started ranks; a context manager that kills what is left of them, their children included, at its end.

    Each rank finds ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``FOLDER`` (a temporary folder that all share) in its
    environment and leads a process group of its own.

    Args:
        target: what each process runs: ``target(rank, ranks, *arguments)``.
        ranks: how many processes.
        arguments: what the function gets besides.
        env: what is added to the environment.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        ranks: int,
        arguments: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.folder = Path(self._folder.name)
        self._processes = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "FOLDER": str(self.folder),
                **(env or {}),
            }
            files = (self._file(rank, "out"), self._file(rank, "err"))
            process = _FORK.Process(target=_run, args=(target, (rank, ranks, *arguments), environment, files))
            process.start()
            with suppress(OSError):  # also done by itself: whoever comes first
                os.setpgid(process.pid, process.pid)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._folder.cleanup()

    def group(self, rank: int) -> int:
        """The process group that a rank leads; its children are in it."""
        return self._processes[rank].pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self._processes[rank].pid, number)

    def wait_for(self, name: str, deadline: float = 600.0) -> None:
        """Wait until some rank has made the file ``name`` in the shared folder."""
        end = time.monotonic() + deadline
        while not (self.folder / name).exists():
            in_time = time.monotonic() < end and any(process.is_alive() for process in self._processes)
            assert in_time, f"no rank made {name}:\n{self._said()}"
            time.sleep(0.01)

    def wait(self, deadline: float = 600.0) -> list[RankResult]:
        """How the ranks ended; an AssertionError with their output when one has not after ``deadline`` seconds."""
        end = time.monotonic() + deadline
        for process in self._processes:
            process.join(max(end - time.monotonic(), 0))
        results = self._results()
        assert all(result.code is not None for result in results), f"not all ended within {deadline} s:\n{self._said()}"
        return results

    def _results(self) -> list[RankResult]:
        return [
            RankResult(rank, process.exitcode, self._file(rank, "out").read_text(), self._file(rank, "err").read_text())
            for rank, process in enumerate(self._processes)
        ]

    def _said(self) -> str:
        return "\n".join(map(str, self._results()))

    def _file(self, rank: int, stream: str) -> Path:
        file = self.folder / f"rank{rank}.{stream}"
        file.touch()
        return file


def run_ranks(
    target: Callable[..., Any],
    ranks: int,
    deadline: float = 600.0,
    env: Mapping[str, str] | None = None,
    arguments: Sequence[Any] = (),
) -> list[RankResult]:
    """Run ``target`` (see `Ranks`) to its end in ``ranks`` processes; after ``deadline`` seconds it has failed."""
    with Ranks(target, ranks, arguments, env) as started:
        return started.wait(deadline)


def assert_all_good(results: Sequence[RankResult]) -> None:
    """Every rank ended with exit code 0."""
    assert all(result.code == 0 for result in results), "\n".join(map(str, results))


def memory_of_process(name: str) -> int:
    """Bytes of this process by their name in ``/proc``: ``"VmRSS"``, or ``"VmHWM"`` for the peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def _run(
    target: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str], files: tuple[Path, Path]
) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    os.environ.update(environment)
    with files[0].open("a") as out, files[1].open("a") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = out, err  # not pytest's any more
        try:
            target(*arguments)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
