"""The Ray of a run: a cluster that exists, or one on this machine that begins and ends with the run."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.producers import ray_host

Producers = Literal["ray"]
"""Whoever makes steps instead of a rank's own workers."""

_START_SECONDS = 300
_REACHED_SECONDS = 30
_END_SECONDS = 60
_TOLD = "address.json"
_OWN_FOLDER = "r"
"""Of Ray, which lets everybody into it; so it lies in one that lets in nobody else."""

_STORE_BYTES = 1 << 32
"""Of steps that wait in the memory of a local Ray, at most; it writes more to its folder."""

_LONGEST_FOLDER = 40
"""Letters: Ray makes sockets in it, whose paths may have 107."""

_UNTOLD = {
    "enable_metrics_collection": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    "debug_dump_period_milliseconds": 0,
}
"""Of this run's own Ray nobody asks for figures and events, which it would gather all the time."""

RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Runs a script without its folder among those of modules."""


@dataclass(frozen=True)
class RayCluster:
    """The Ray to which the loaders of a rank connect.

    Attributes:
        address: of Ray.
        environment: variables that whoever connects needs.
        producers: that each loader of each rank has.
        share: of one processor that a producer reserves.
        is_local: it is of this machine and this run.
    """

    address: str
    environment: Mapping[str, str] = field(repr=False)
    producers: int
    share: float
    is_local: bool


class LocalRay:
    """Ray on this machine: on loopback, for whoever knows its token, without a dashboard, its memory bounded.

    It ends with :meth:`close`, and with this process, however that ends.

    Args:
        folder: of its sockets and logs, which is made, and is gone at the end.

    Raises:
        DataError: it does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._token = secrets.token_hex(32)
        found_here = os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))  # classes of the user's
        environment = {**os.environ, **_local_environment(self._token), "PYTHONPATH": found_here}
        environment.pop("RAY_ADDRESS", None)
        settings = {
            "address": "local",
            "include_dashboard": False,
            "_system_config": {
                "worker_niceness": 0,  # as a rank's own workers have it; Ray's is 15
                "prestart_worker_first_driver": False,  # else a process for each processor, whoever needs it
                **_UNTOLD,
            },
            "object_store_memory": min(_STORE_BYTES, memory // 8),
            "_temp_dir": str(folder / _OWN_FOLDER),
        }
        try:
            self._host = _start_host(settings, environment)
            self._found = _answer(self._host)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def tell(self, file: Path) -> None:
        """Write how to reach it where other ranks of this user read it."""
        told = file.with_suffix(".part")
        told.touch(mode=0o600)
        told.write_text(json.dumps({**self._found, "token": self._token}), encoding="utf-8")
        told.rename(file)

    def close(self, *, waits: bool = True) -> None:
        """End it; without ``waits`` it ends by itself a little later."""
        assert self._host.stdin is not None
        self._host.stdin.close()
        if not waits:
            return
        try:
            self._host.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._host.kill()  # Ray's processes then end, too
            self._host.wait()
            shutil.rmtree(self._folder, ignore_errors=True)


def refuse_without_ray() -> None:
    """Raises a DataError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise DataError(
            "FlowDataModule(producers='ray') needs Ray, which is not installed: pip install "
            '"flowtrain-lightning[ray]", or leave producers out and set num_workers.'
        )


def connect_ranks(trainer: L.Trainer | None, producers: int) -> tuple[RayCluster, LocalRay | None]:
    """Find the cluster of ``RAY_ADDRESS``, or start Ray on each node, in its first rank. Every rank calls it.

    Args:
        trainer: knows the ranks; None: there is this process alone.
        producers: for each loader of a rank; 0 takes as many as there are processors for a rank.

    Returns:
        what the rank connects to, and what it has started, if anything.

    Raises:
        DataError: Ray cannot be reached or started.
    """
    refuse_without_ray()
    address, name = os.environ.get("RAY_ADDRESS", ""), secrets.token_hex(8)
    if trainer is not None:
        address, name = trainer.strategy.broadcast([address, name])
    started = None
    if address:
        found = _asked(address) if trainer is None or trainer.is_global_zero else {}
        ranks, environment = (1 if trainer is None else trainer.world_size), {}
    else:
        folder = _temporary_folder() / f"flowtrain-{name}"
        if trainer is None or trainer.local_rank == 0:
            started = LocalRay(folder)
            started.tell(folder / _TOLD)
        if trainer is not None:
            trainer.strategy.barrier("Ray has started")
        found = _told(folder / _TOLD)
        ranks, environment = (1 if trainer is None else trainer.num_devices), _local_environment(found["token"])
        address = found["address"]
    if trainer is not None:  # of rank 0: the steps that each rank looks ahead must be equally many
        found = trainer.strategy.broadcast({name: found.get(name) for name in ("processors", "error")})
    if found.get("error"):
        raise DataError(
            f"The Ray cluster of RAY_ADDRESS={address} cannot be used: {found['error']}. Start it, or unset it "
            "for a Ray on this machine that begins and ends with the run."
        )
    processors = found["processors"]
    producers = producers or max(1, processors // ranks)
    share = min(1.0, processors / (producers * ranks)) / 2  # a fit has loaders of training and of validation
    return RayCluster(address, environment, producers, share, bool(environment)), started


def _local_environment(token: str) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # by which Ray, on Linux too, stays on loopback
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _temporary_folder() -> Path:
    folder = tempfile.gettempdir()
    return Path(folder if len(folder) <= _LONGEST_FOLDER - len(f"/flowtrain-/{_OWN_FOLDER}") - 16 else "/tmp")


def _start_host(settings: Mapping[str, Any], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, ray_host.__file__, json.dumps(settings)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that a signal to the run's processes reaches Ray's after the rank
    )


def _answer(host: subprocess.Popen[str]) -> dict[str, Any]:
    """The address and processors of a Ray that was started.

    Raises:
        DataError: it was not.
    """
    assert host.stdout is not None
    line = host.stdout.readline() if select.select([host.stdout], [], [], _START_SECONDS)[0] else ""
    found = json.loads(line) if line else {"error": f"it gave no answer within {_START_SECONDS} s, or died"}
    if "error" in found:
        host.kill()
        raise DataError(f"Ray cannot be started on this machine: {found['error']}.")
    return dict(found)


def _asked(address: str) -> dict[str, Any]:
    """Processors of a cluster that exists, or the error of connecting to it."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:  # Ray itself would try for minutes
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED_SECONDS).close()
    except OSError as error:
        return {"error": str(error)}
    command = [sys.executable, "-c", RUN, ray_host.__file__, json.dumps({"address": address})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"it gave no answer within {_START_SECONDS} s"}
    if not done.stdout:
        return {"error": (done.stderr.strip().splitlines() or ["the process that asked has died"])[-1]}
    return dict(json.loads(done.stdout))


def _told(file: Path) -> dict[str, Any]:
    """What the first rank of this node has told; a file of somebody else is not believed."""
    with file.open(encoding="utf-8") as opened:
        if os.fstat(opened.fileno()).st_uid != os.getuid():
            raise DataError(f"{file} is not of this user, so the Ray that it names is not used.")
        return dict(json.load(opened))
