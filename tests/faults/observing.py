"""Runs a job and watches its processes to their end, after which nothing of it lives."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.faults.fault import INJECTED
from tests.faults.job import Ended, Job, rank_of, text_of
from tests.leftovers import abandoned_files, newly_abandoned_files

SCRIPT = Path(__file__).with_name("train.py")
_LEFT_SECONDS = 5.0
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def run_script(job: Job, *, torchrun: bool = False, restarts: int = 0) -> Ended:
    """Run the script as a user does: alone, so that Lightning starts the other ranks, or by torchrun.

    Args:
        job: the job.
        torchrun: by torchrun.
        restarts: how often torchrun starts all ranks again when one has ended with an error.
    """
    command = [sys.executable, str(SCRIPT)]
    if torchrun:
        rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(job.port)]
        numbers = ["--nproc-per-node", str(job.ranks), "--max-restarts", str(restarts)]
        command[1:1] = ["-m", "torch.distributed.run", *rendezvous, *numbers]
    with (job.folder / "said").open("ab") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | job.environment(),
            start_new_session=True,
        )
    try:
        return observe(job, process.pid)
    finally:
        process.wait()


def observe(job: Job, pid: int) -> Ended:
    """Wait until nothing of the job lives, or its deadline has passed; then nothing of it lives either.

    Args:
        job: the job.
        pid: its first process, a child of this one that leads a session of its own.
    """
    job.temporary.mkdir(exist_ok=True)
    abandoned = abandoned_files()
    processes = _Processes(job, pid)
    with _orphans_adopted():
        try:
            if job.interrupt:
                processes.interrupt()
            left = processes.wait()
        finally:
            processes.kill()
    over = time.monotonic()
    left += sorted(newly_abandoned_files(abandoned)) + _temporary_files(job.temporary) + _listeners(job.port)
    shutil.rmtree(job.temporary)
    came = float(text_of(job.folder / INJECTED) or "inf")
    ranks = processes.ranks()
    return Ended(
        folder=job.folder,
        code=processes.codes[pid],
        codes={rank: processes.codes[pid] for rank, pid in ranks.items() if pid in processes.codes},
        # On a busy machine a rank may begin and end between two looks.
        seconds={rank: processes.ended.get(pid, over) - came for rank, pid in ranks.items()},
        said=text_of(job.folder / "said"),
        files={rank_of(path): path.read_text() for path in job.folder.glob("fault-rank*.txt")},
        left=left,
    )


class _Processes:
    """The processes of a job: those of its session, and those that carry its mark.

    Attributes:
        codes: process -> exit code, once it has ended, if this process can know it.
        ended: process -> when it ended.
    """

    def __init__(self, job: Job, pid: int) -> None:
        self._job = job
        self._pid = pid
        self._seen = {pid: psutil.Process(pid)}
        self._strangers: set[int] = set()
        self._end = time.monotonic() + job.deadline
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}

    def ranks(self) -> dict[int, int]:
        """Rank -> process, of the ranks that came as far as the script."""
        texts = {rank_of(path): path.read_text().split() for path in self._job.folder.glob("rank*.pid")}
        return {rank: int(text[-1]) for rank, text in texts.items() if text}

    def interrupt(self) -> None:
        """Press Ctrl-C when rank 0 is in step 2."""
        while "2" not in text_of(self._job.folder / "rank0.steps").split() and time.monotonic() < self._end:
            time.sleep(0.01)
        (self._job.folder / INJECTED).write_text(str(time.monotonic()))
        os.killpg(self._pid, signal.SIGINT)

    def wait(self) -> list[str]:
        """Wait for their end.

        Returns:
            those that live on after all ranks but the broken one have ended.
        """
        victim = self._job.fault.rank if self._job.fault else -1
        calm = time.monotonic()
        while True:
            living, now = self._look(), time.monotonic()
            if not living:
                return []
            survivors = {pid for rank, pid in self.ranks().items() if rank != victim} | {self._pid}
            if any(process.pid in survivors for process in living):
                calm = now
            if now > min(self._end, calm + _LEFT_SECONDS):
                return [f"process {process.pid}: {process.cmdline()}" for process in living]
            time.sleep(0.05)

    def kill(self) -> None:
        """Leave none of them behind."""
        while living := self._look():
            for process in living:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)

    def _look(self) -> list[psutil.Process]:
        for pid in psutil.pids():
            if pid not in self._seen and pid not in self._strangers:
                if self._is_ours(pid):
                    with suppress(psutil.NoSuchProcess):  # it lived for a moment only
                        self._seen[pid] = psutil.Process(pid)
                else:
                    self._strangers.add(pid)
        living = []
        for pid, process in self._seen.items():
            if pid in self.codes:
                continue
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # it is the child of another process, or was
                ended, status = int(not _lives(process)), None
            if not ended:
                living.append(process)
                continue
            self.ended.setdefault(pid, time.monotonic())
            if status is not None:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return living

    def _is_ours(self, pid: int) -> bool:
        with suppress(psutil.Error, ProcessLookupError):
            return os.getsid(pid) == self._pid or psutil.Process(pid).environ().get("JOB") == self._job.mark
        return False


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def _orphans_adopted() -> Iterator[None]:
    """Inside, processes whose parent has died become children of this one, so that it learns how they end."""
    library = ctypes.CDLL(None)
    library.prctl(_ADOPT_ORPHANS, ctypes.c_ulong(1), 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_ADOPT_ORPHANS, ctypes.c_ulong(0), 0, 0, 0)


def _temporary_files(folder: Path) -> list[str]:
    """What the job left in its folder of temporary files, but for that of torchrun's logs, which it leaves there."""
    return [str(path) for path in folder.iterdir() if not path.name.startswith("torchelastic_")]


def _listeners(port: int) -> list[str]:
    listening = [c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [f"a listener on port {port}"] if port in listening else []
