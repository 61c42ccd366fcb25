"""Starts runs one after another, each with a deadline, and says on what machine."""

from __future__ import annotations

import multiprocessing
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.modules import ROOT

tqdm.monitor_interval = 0  # no thread beside the main one, since processes are forked

_FAREWELL_SECONDS = 15.0
"""How long the other ranks have to end when one has failed."""


def launch(target: Callable[[Any], None], job: Any, ranks: int, folder: Path, deadline: float) -> None:
    """Run ``target(job)`` in one process per rank, and leave no process behind.

    The processes are forks of this one, which spares them the import of torch and Lightning; they find their ranks in
    the environment, as under torchrun. Each uses as many threads as this one was started with.

    Args:
        target: what each rank does.
        job: its argument.
        ranks: how many processes.
        folder: where ``log<rank>.txt`` are written; what fails is looked for there.
        deadline: seconds after which the run has failed.

    Raises:
        RuntimeError: a rank failed, or they did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    port = _free_port()
    processes = [context.Process(target=_rank, args=(target, job, rank, ranks, port, folder)) for rank in range(ranks)]
    for process in processes:
        process.start()
    end = time.monotonic() + deadline
    try:
        while (left := end - time.monotonic()) > 0:
            running = [process.sentinel for process in processes if process.is_alive()]
            if not running:
                break
            connection.wait(running, left)
            if any(process.exitcode not in (None, 0) for process in processes):
                end = min(end, time.monotonic() + _FAREWELL_SECONDS)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()  # the workers that load for it end with it
            process.join()
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        log = folder / f"log{rank}.txt"
        raise RuntimeError(f"rank {rank} ended with code {codes[rank]}:\n{log.read_text(errors='replace')[-3000:]}")
    if None in codes:
        log = folder / f"log{codes.index(None)}.txt"
        raise RuntimeError(f"no end within {deadline:.0f} s:\n{log.read_text(errors='replace')[-3000:]}")


def _rank(target: Callable[[Any], None], job: Any, rank: int, ranks: int, port: int, folder: Path) -> None:
    with (folder / f"log{rank}.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }
    target(job)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def machine() -> dict[str, str]:
    """Where and with what the figures were made."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit or "unknown",
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }
