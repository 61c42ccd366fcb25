"""Runs functions in real processes that are forked from one, so that a session of tests pays for imports once."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checked import leave_out_packing_check, packing_is_checked
from tests.paths import python_path
from tests.ports import free_port
from tests.warm import warm_up


@dataclass(frozen=True)
class Job:
    """A function that some ranks run: ``target(folder, **arguments)``, with ``RANK`` and its like in the environment.

    Attributes:
        name: of the job and of its folder.
        target: ``"module:function"``.
        ranks: how many processes.
        arguments: keyword arguments, as JSON types.
        deadline: seconds after which its processes are killed.
        imports: a slow module that ranks would each import for themselves: it is imported before they are forked.
        checks_packing: fits check the packing of their modules; as they do in the process that asks for the job.
    """

    name: str
    target: str
    ranks: int
    arguments: dict[str, Any] = field(default_factory=dict)
    deadline: float = 600.0  # generous: machines are busy, and pytest ends a test that hangs
    imports: str | None = None
    checks_packing: bool = field(default_factory=packing_is_checked)


@dataclass(frozen=True)
class Done:
    """How a job ended.

    Attributes:
        folder: the job's folder, with what its ranks wrote and ``rank0.log`` and so on.
        codes: exit code of each rank; negative for a signal, -9 for one that missed the deadline.
    """

    folder: Path
    codes: list[int]

    @property
    def log(self) -> str:
        """What all ranks printed."""
        logs = sorted(self.folder.glob("rank*.log"))
        return "\n".join(f"--- {log.name} of {self.folder.name}\n{log.read_text(errors='replace')}" for log in logs)

    def check(self) -> Done:
        """The same, when all ranks ended well; else an AssertionError with their output."""
        assert not any(self.codes), f"{self.folder.name} ended with {self.codes}\n{self.log}"
        return self


def run_jobs(folder: Path, jobs: Sequence[Job]) -> dict[str, Done]:
    """Runs the jobs one after another, each in a folder of its name below ``folder``."""
    return {job.name: Done(folder / job.name, in_the_server(_run, job, folder / job.name)) for job in jobs}


def in_the_server(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in the process that has imported everything and computed once, to be forked there."""
    try:
        return _server().call(function, arguments)
    except BaseException:
        # The test was interrupted: what its job answers later must not be taken for the answer of another.
        _server().end()
        _server.cache_clear()
        raise


def write_down(folder: Path, value: Any) -> None:
    """Keeps what this rank of a job saw, for ``read_down``."""
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(value))


def read_down(folder: Path) -> list[Any]:
    """What each rank wrote down, in order of ranks."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


class _Server:
    """The process that has imported everything and computed once. It ends when this process does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        atexit.register(self.end)

    def end(self) -> None:
        """Ends it, and with it what it runs."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((function, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    warm_up()
    gc.freeze()  # what is there stays: forks that collected it would copy its memory
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(function(*arguments), answers)
        answers.flush()


def _run(job: Job, folder: Path) -> list[int]:
    folder.mkdir(parents=True, exist_ok=True)
    parent = os.getppid()  # ranks that still run when the tests have ended abruptly must not outlive them
    for module in filter(None, (job.imports, job.target.partition(":")[0])):
        importlib.import_module(module)
    port = free_port()
    children = [_fork(job, folder, rank, port) for rank in range(job.ranks)]
    codes: dict[int, int] = {}
    end = time.monotonic() + job.deadline
    while len(codes) < len(children):
        for child in [child for child in children if child not in codes]:
            if time.monotonic() > end or os.getppid() != parent:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[child] for child in children]


def _fork(job: Job, folder: Path, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if not job.checks_packing:
            leave_out_packing_check(pytest.MonkeyPatch())
        module, _, function = job.target.partition(":")
        getattr(importlib.import_module(module), function)(folder, **job.arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's own end is left out: gloo's threads may still drop finished work under its feet.
        os._exit(code)


if __name__ == "__main__":
    _serve()
