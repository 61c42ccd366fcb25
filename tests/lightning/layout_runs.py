"""Makes runs on layouts in real processes, and hands over what every rank noted."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Job, run_jobs
from tests.lightning.run_context import DEVICES, RunContext
from tests.paths import python_path

SECONDS = 400
"""The longest that all runs of a layout may take, on a machine that does other work as well."""

FAILURE = "failure.txt"
"""What a run's processes printed if it failed."""

Notes = list[dict[str, Any]]
"""What each rank noted."""


class LayoutRuns:
    """Makes runs, each at most once on a layout, also where several pytest workers ask for them.

    A run is a function of a `RunContext`; test modules list theirs in ``LAYOUTS_OF_RUNS``. A run that fails takes its
    processes down; the runs after it are made in new ones.

    Args:
        runs: every run with its layouts, alike in all workers.
        folder: where runs leave what they write and note; one for all workers.
        data_folder: the records.
    """

    def __init__(
        self, runs: dict[Callable[[RunContext], None], tuple[str, ...]], folder: Path, data_folder: Path
    ) -> None:
        self._runs = runs
        self._folder = folder
        self._data_folder = data_folder

    def notes(self, run: Callable[[RunContext], None], layout: str) -> Notes:
        """What each rank noted in a run."""
        while not self._is_made(layout):
            self._make_or_wait(layout)
        folder = self.folder(run, layout)
        if (failure := folder / FAILURE).exists():
            pytest.fail(f"{run.__name__} failed on {layout}:\n{failure.read_text()}")
        return [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(DEVICES[layout])]

    def folder(self, run: Callable[[RunContext], None], layout: str) -> Path:
        """Where a run's Trainers wrote."""
        return self._folder / layout / run.__name__

    def _make_or_wait(self, wanted: str) -> None:
        """Makes the runs of a layout that no other worker makes, the wanted one if it can; else waits for that."""
        for layout in sorted(DEVICES, key=lambda layout: layout != wanted):
            with self._claimed(layout) as alone:
                if alone and not self._is_made(layout):
                    return self._make(layout)
        with self._claimed(wanted, wait=True):
            return None

    @contextmanager
    def _claimed(self, layout: str, wait: bool = False) -> Iterator[bool]:
        """Whether this worker is the one that may make the runs of a layout; it is until the end of the block."""
        with (self._folder / f"{layout}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True

    def _is_made(self, layout: str) -> bool:
        return (self._folder / f"{layout}.made").exists()

    def _make(self, layout: str) -> None:
        waiting = [run for run, layouts in self._runs.items() if layout in layouts]
        while waiting:
            done = self._start(layout, [f"{run.__module__}:{run.__name__}" for run in waiting])
            ended = [run for run in waiting if self._is_over(run, layout)]
            waiting = waiting[len(ended) :]
            if waiting:
                failed = self.folder(waiting.pop(0), layout)
                failed.mkdir(parents=True, exist_ok=True)
                (failed / FAILURE).write_text(done)
        (self._folder / f"{layout}.made").touch()

    def _is_over(self, run: Callable[[RunContext], None], layout: str) -> bool:
        return all((self.folder(run, layout) / f"notes-{rank}.json").exists() for rank in range(DEVICES[layout]))

    def _start(self, layout: str, runs: list[str]) -> str:
        """Makes runs in one start of the layout's processes; returns what they printed."""
        given = {"layout": layout, "data_folder": str(self._data_folder), "runs": runs}
        job = Job(layout, "tests.lightning.run_context:make", DEVICES[layout], given, deadline=SECONDS)
        return run_jobs(self._folder, [job])[layout].log[-20000:]


@contextmanager
def launch(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command that prints into ``log``, with more environment variables; at the end nothing of it is left."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # a process group of its own
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
