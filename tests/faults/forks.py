"""Runs jobs whose processes are forked from the server of `tests.forks`: a start takes no time.

A job's first process is forked here, and where the launcher would start the script anew for every other rank
the first process forks itself: so each is whose child it would be, and only the imports are saved.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from flowtrain_lightning.trainer import launcher
from tests.faults import train
from tests.faults.job import Ended, Job
from tests.faults.observing import observe
from tests.forks import in_the_server


def run_forked(job: Job) -> Ended:
    """What becomes of the job."""
    ended = in_the_server(_fork_and_observe, job)
    assert isinstance(ended, Ended)
    return ended


class ForkedRank:
    """What the launcher uses of ``subprocess.Popen``, with a fork in place of a new interpreter."""

    def __init__(self, command: list[str], env: Mapping[str, str], cwd: str | None) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.environ.clear()
            os.environ.update(env)
            train.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            sys.last_value = error  # as the interpreter does
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _fork_and_observe(job: Job) -> Ended:
    pid = os.fork()
    if pid == 0:
        _first_process(job)
        raise SystemExit  # so that the interpreter ends as a user's does
    return observe(job, pid)


def _first_process(job: Job) -> None:
    os.setsid()
    os.environ.update(job.environment())
    said = os.open(job.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
        os.dup2(file, stream)
    launcher.subprocess = _Subprocess  # type: ignore[assignment]
    if job.hosts is not None:
        for rank in range(1, job.ranks):
            ForkedRank([], {**os.environ, **job.place(rank)}, None)
        os.environ.update(job.place(0))
    train.main()


class _Subprocess:
    Popen: Any = ForkedRank
