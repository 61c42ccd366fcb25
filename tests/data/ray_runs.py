"""Loaders whose steps producers make, what of Ray runs meanwhile, and comparisons to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flowtrain_lightning.data import FlowDataModule, StepBatch, StepLoader
from tests.data.support import data_module
from tests.hosts import ADDRESSES, on_host
from tests.paths import python_path

ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
"""Variables of whoever starts a cluster that other users cannot reach, and of whoever connects to it."""


@contextmanager
def produced(file: Path, **changes: Any) -> Iterator[tuple[StepLoader, FlowDataModule]]:
    """A loader whose steps two producers make, unless ``changes`` say otherwise, and its data module."""
    data = data_module(file, **{"producers": "ray", "num_workers": 2, **changes})
    try:
        data.setup("fit")
        yield data.train_dataloader(), data
    finally:
        data.teardown()


@contextmanager
def cluster(folder: Path, **settings: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A Ray cluster of somebody else, on loopback: its address, and the process that ends it."""
    given = {"include_dashboard": False, "log_to_driver": False, "_temp_dir": str(folder), **settings}
    given["_system_config"] = {"worker_niceness": 0}
    code = (
        f"import ray, sys; ray.init('local', **{given!r}); "
        "print('at', ray.get_runtime_context().gcs_address, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **ON_LOOPBACK, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("at ")), process
    finally:
        process.stdin.close()
        process.wait(60)


def epoch_of(loader: StepLoader, epoch: int) -> Iterator[StepBatch]:
    """The steps of an epoch."""
    loader.sampler.set_epoch(epoch)
    return iter(loader)


def are_equal(mine: Iterable[StepBatch], theirs: Iterable[StepBatch]) -> bool:
    """Two series of steps are equal to the bit; raises a ValueError where one is longer."""
    return all(_bits(one) == _bits(other) for one, other in zip(mine, theirs, strict=True))


def _bits(step: StepBatch) -> list[Any]:
    tensors = [tensor for microbatch in step.microbatches if microbatch is not None for tensor in microbatch.tensors]
    for media in step.media["encoder"]:
        tensors += [] if media is None else [media.pixels, media.cu_seqlens, media.grid]
    return [step.epoch, step.step, *((one.dtype, one.shape, one.contiguous().numpy().tobytes()) for one in tensors)]


def processes_of_ray() -> list[psutil.Process]:
    """Those that this process has started, of Ray and of what speaks to it."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "ray" in " ".join(_command(child))]


def producers_alive() -> list[psutil.Process]:
    """Those in which producers are."""
    return [child for child in processes_of_ray() if _command(child)[0].startswith("ray::Producer")]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses at which processes admit others."""
    connections = [one for process in processes for one in process.net_connections("inet")]
    return {one.laddr.ip.removeprefix("::ffff:") for one in connections if one.status == psutil.CONN_LISTEN}


@contextmanager
def cluster_of_hosts(python: str = sys.executable) -> Iterator[dict[str, str]]:
    """A Ray cluster of both hosts that this process has made, the second of which makes steps; how to reach it.

    Args:
        python: the second host's.
    """
    address = f"{ADDRESSES[0]}:6379"
    own = {name: value for name, value in ON_LOOPBACK.items() if name.startswith("RAY_AUTH")}
    given = {**os.environ, **own, "PYTHONPATH": python_path(), "RAY_USAGE_STATS_ENABLED": "0"}
    given["RAY_worker_niceness"] = "0"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}"]
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            nodes_given = ((sys.executable, head), (python, [f"--address={address}", "--num-cpus=2"]))
            for host, (interpreter, settings) in enumerate(nodes_given):
                small = ["--object-store-memory=80000000", f"--node-ip-address={ADDRESSES[host]}", "--block"]
                command = [interpreter, "-m", "ray.scripts.scripts", "start", *settings, *small]
                log = open(Path(folder, f"host{host}.log"), "wb")  # noqa: SIM115
                nodes.append(subprocess.Popen(on_host(host, command), env=given, stdout=log, stderr=log))
                while b"Ray runtime started" not in Path(log.name).read_bytes():
                    assert nodes[-1].poll() is None, Path(log.name).read_text()
                    time.sleep(0.2)
            yield {**own, "RAY_ADDRESS": address}
        finally:
            started = [each for node in nodes for each in psutil.Process(node.pid).children(recursive=True)]
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait(60)
            for process in psutil.wait_procs(started, timeout=20)[1]:
                process.kill()
