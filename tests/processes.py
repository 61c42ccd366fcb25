"""Runs something in several real processes with a deadline, and leaves none of them behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class RankResult:
    """How one rank's process ended. ``code`` is negative for a signal, as in `subprocess`."""

    rank: int
    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"--- rank {self.rank}: exit {self.code}\n{self.out}\n{self.err}"


class Ranks:
    """Started ranks; a context manager that kills what is left of them, their children included, at its end.

    Each rank finds ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``FOLDER`` (a temporary folder that all share) in its
    environment and leads a process group of its own.

    Args:
        target: a script, or a function of a module in `tests`, called as ``target(rank, ranks, *arguments)``.
        ranks: how many processes.
        arguments: strings for the script's command line or the function.
        env: what is added to the environment.
    """

    def __init__(
        self,
        target: Path | str | Callable[..., Any],
        ranks: int,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.folder = Path(self._folder.name)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._started = time.monotonic()
        command = _command(target, arguments)
        for rank in range(ranks):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "FOLDER": str(self.folder),
                **(env or {}),
            }
            with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as err:
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, process_group=0
                    )
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(number)

    def wait_for(self, name: str, deadline: float = 60.0) -> None:
        """Wait until some rank has made the file ``name`` in the shared folder."""
        end = time.monotonic() + deadline
        while not (self.folder / name).exists():
            if time.monotonic() > end or all(process.poll() is not None for process in self.processes):
                raise AssertionError(f"no rank made {name}:\n" + "\n".join(map(str, self._results())))
            time.sleep(0.01)

    def wait(self, deadline: float) -> list[RankResult]:
        """Wait until all ranks have ended, ``deadline`` seconds at most.

        Raises:
            AssertionError: when one has not; with everybody's output.
        """
        end = time.monotonic() + deadline
        seconds: dict[int, float] = {}
        while len(seconds) < len(self.processes):
            for rank, process in enumerate(self.processes):
                if rank not in seconds and process.poll() is not None:
                    seconds[rank] = time.monotonic() - self._started
            if time.monotonic() > end:
                raise AssertionError(
                    f"only ranks {sorted(seconds)} ended within {deadline} s:\n" + "\n".join(map(str, self._results()))
                )
            time.sleep(0.01)
        return self._results(seconds)

    def _results(self, seconds: Mapping[int, float] | None = None) -> list[RankResult]:
        return [
            RankResult(
                rank,
                process.returncode if process.returncode is not None else 0,
                self._file(rank, "out").read_text(errors="replace"),
                self._file(rank, "err").read_text(errors="replace"),
                (seconds or {}).get(rank, 0.0),
            )
            for rank, process in enumerate(self.processes)
        ]

    def _file(self, rank: int, stream: str) -> Path:
        return self.folder / f"rank{rank}.{stream}"


def run_ranks(
    target: Path | str | Callable[..., Any],
    ranks: int,
    deadline: float = 60.0,
    env: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> list[RankResult]:
    """Run ``target`` (see `Ranks`) to its end in ``ranks`` processes; after ``deadline`` seconds it has failed."""
    with Ranks(target, ranks, arguments, env) as started:
        return started.wait(deadline)


def assert_all_good(results: Sequence[RankResult]) -> None:
    """Every rank ended with exit code 0."""
    assert all(result.code == 0 for result in results), "\n".join(map(str, results))


def _command(target: Path | str | Callable[..., Any], arguments: Sequence[str]) -> list[str]:
    if callable(target):
        return [sys.executable, "-m", "tests.processes", target.__module__, target.__name__, *arguments]
    return [sys.executable, str(target), *arguments]


if __name__ == "__main__":
    module, name, *given = sys.argv[1:]
    getattr(importlib.import_module(module), name)(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *given)
