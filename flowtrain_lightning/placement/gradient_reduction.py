"""Times how ranks of one node sum their gradients, by two processes."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
import warnings
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flowtrain_lightning.packing.cost_model import Observation, fit_cost
from flowtrain_lightning.parallel import ReplicatedHalf
from flowtrain_lightning.placement.profile import ProfileError, ReductionCost
from flowtrain_lightning.runtime.process_end import die_with_parent

_RANKS = 2
_SIZES = (1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
"""Bytes of gradients."""
_WARM_UPS = 2
_ROUNDS = 7


def measure_reduction(deadline: float = 30.0) -> ReductionCost:
    """Let two ranks on CPUs, with one thread each, sum gradients of several sizes.

    The ranks are forks, which are there at once, unless this process is in a process group. Best called before it has
    computed anything.

    Args:
        deadline: seconds after which they are ended.

    Raises:
        ProfileError: they failed, or not all was done in time.
    """
    # A fresh interpreter takes seconds to import what a rank needs; but a fork of a process that is in a process group
    # is in it, too.
    grouped = dist.is_initialized()
    context = multiprocessing.get_context("spawn") if grouped else multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="flowtrain-") as name:
        folder = Path(name)
        ranks: list[BaseProcess] = [
            context.Process(target=_rank, args=(rank, folder, deadline), daemon=True) for rank in range(_RANKS)
        ]
        end = time.monotonic() + deadline
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                for process in ranks:
                    process.start()
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
        try:
            seconds = json.loads(_result(folder).read_text())
        except OSError as error:
            raise ProfileError(
                f"Two ranks on this machine did not sum gradients: they failed, or took more than {deadline:g} s."
            ) from error
    cost = fit_cost([Observation(size, 0.0, each) for size, each in zip(_SIZES, seconds, strict=True)])
    return ReductionCost(_RANKS, cost.constant, cost.linear)


def _rank(rank: int, folder: Path, deadline: float) -> None:
    die_with_parent()
    torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=_RANKS, timeout=timedelta(seconds=deadline))
    seconds = [_measure(size) for size in _SIZES]
    if rank == 0:
        unfinished = folder / "unfinished"
        unfinished.write_text(json.dumps(seconds))
        unfinished.replace(_result(folder))
    dist.destroy_process_group()


def _measure(size: int) -> float:
    weight = nn.Parameter(torch.zeros(size // 4))
    weight.grad = torch.ones_like(weight)
    half = ReplicatedHalf([weight])
    times = []
    for _ in range(_WARM_UPS + _ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        half.begin_step()
        half.finish_gradients(1 / _RANKS)
        times.append(time.perf_counter() - start)
    return float(np.median(times[_WARM_UPS:]))


def _result(folder: Path) -> Path:
    return folder / "seconds.json"
