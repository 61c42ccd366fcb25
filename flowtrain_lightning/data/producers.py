"""Steps that producers make: actors of Ray, on nodes of a cluster or on this machine, a number of steps ahead.

Only a worker of the loader speaks to Ray. To the rank it is one that loads, and what it gives travels as workers' steps
do: what becomes of Ray does not become of the rank.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.dataset import StepDataset
from flowtrain_lightning.data.ray_cluster import RayCluster
from flowtrain_lightning.data.sampler import StepSampler
from flowtrain_lightning.data.step_packing import StepPacking
from flowtrain_lightning.data.workers import SharedMemoryBatch

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_AHEAD = 2
"""Steps that each producer has: one that it makes, and the next."""

_RETRIES = 3
"""How often a step is made anew, at most, because its producer died."""

_SLOW_SECONDS = 60.0
_LONGEST_SECONDS = 1800.0
_NAMED_SAMPLES = 8

_DECISIVE = (
    "flowtrain-lightning",
    "numpy",
    "torch",
    "pillow",
    "tokenizers",
    "transformers",
    "av",
    "pyarrow",
    "datasets",
)
"""Packages that decide what becomes of a record."""

StepKey = tuple[int, int, StepPacking]
"""Epoch, number and packing of a step."""


class StepsAhead(Sampler[tuple[StepKey, ...]]):
    """Each step of a sampler, with those that follow it, which producers may begin.

    Args:
        steps: the steps.
        count: of each window, at most; fewer at an epoch's end.
    """

    def __init__(self, steps: StepSampler, count: int) -> None:
        self._steps = steps
        self._count = count

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[StepKey, ...]]:
        steps = iter(self._steps)
        window = tuple(islice(steps, self._count))
        while window:
            yield window
            window = (*window[1:], *islice(steps, 1))


class ProducedSteps(Dataset[SharedMemoryBatch | None]):
    """The steps of a rank, by a window of which the first one is wanted. One worker of a loader reads them.

    Args:
        steps: the rank's part of each step.
        cluster: the Ray on which producers run.
    """

    def __init__(self, steps: StepDataset, cluster: RayCluster) -> None:
        self._steps = steps
        self._cluster = cluster
        self._origin: StepsOrigin | None = None
        self._producers: list[Any] = []
        self._making: dict[StepKey, tuple[int, Any]] = {}
        self._received = 0

    @staticmethod
    def ahead(cluster: RayCluster) -> int:
        """Steps that producers have for each loader, at most: this bounds what waits for it."""
        return _AHEAD * cluster.producers

    def __getitem__(self, window: tuple[StepKey, ...]) -> SharedMemoryBatch | None:
        if not self._producers:
            self._connect()
        self._making = {key: making for key, making in self._making.items() if key in window}
        for key in window:
            if key not in self._making:
                self._begin(key)
        batch = self._wait_for(window[0])
        self._received += 1
        return batch

    def _connect(self) -> None:
        os.environ.update(self._cluster.environment)
        import ray

        settings: dict[str, Any] = {}
        if not self._cluster.is_local:
            found_here = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
            settings = {"runtime_env": {"env_vars": {"PYTHONPATH": found_here}}}
        try:
            ray.init(self._cluster.address, log_to_driver=False, configure_logging=False, **settings)
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            raise DataError(f"The loader cannot connect to Ray at {self._cluster.address}: {error}") from error
        actor = ray.remote(Producer).options(
            num_cpus=self._cluster.share,
            max_restarts=-1,
            max_task_retries=_RETRIES,
            scheduling_strategy="SPREAD",
        )
        self._origin = StepsOrigin([ray.put(self._steps)], os.getcwd(), versions())
        self._producers = [actor.remote() for _ in range(self._cluster.producers)]

    def _begin(self, key: StepKey) -> None:
        """Give a step to the producer that has the fewest left."""
        import ray

        begun = [reference for _, reference in self._making.values()]
        made = set(ray.wait(begun, num_returns=len(begun), timeout=0)[0]) if begun else set()
        left = [0] * len(self._producers)
        for producer, reference in self._making.values():
            left[producer] += reference not in made
        producer = left.index(min(left))
        self._making[key] = producer, self._producers[producer].produce.remote(self._origin, *key)

    def _wait_for(self, key: StepKey) -> SharedMemoryBatch | None:
        import ray

        _, reference = self._making.pop(key)
        began = time.monotonic()
        while not ray.wait([reference], timeout=_SLOW_SECONDS)[0]:
            self._tell_slow(key, time.monotonic() - began)
        try:
            body, block, layout, stream, seconds, error = ray.get(reference)
        except ray.exceptions.RayTaskError as failed:
            raise failed.cause from None
        except ray.exceptions.RayError as failed:
            raise DataError(f"Producers could not make {self._named(key)}: {failed}") from failed
        if error is not None:
            raise DataError(error)
        if body is None:
            return None
        with warnings.catch_warnings():  # of memory that is not to be written to; the rank gets a copy
            warnings.simplefilter("ignore")
            return SharedMemoryBatch(body, torch.from_numpy(block), layout, stream, seconds)

    def _tell_slow(self, key: StepKey, seconds: float) -> None:
        """Say what has not come, and give up at some time.

        Raises:
            DataError: it was waited for too long.
        """
        told = f"Producers have not made {self._named(key)} within {seconds:.0f} s."
        if not self._received:
            told += " None has made any: see `ray status` for free processors."
        if seconds >= _LONGEST_SECONDS:
            raise DataError(f"{told} The run ends here; leave slow records out, or move their files nearer.")
        _log.warning(told)

    def _named(self, key: StepKey) -> str:
        """A step, with the records that this rank needs of it."""
        epoch, step, packing = key
        samples = self._steps.needed(self._steps.plan(epoch, step, packing))
        where = [self._steps.samples.where(sample) for sample in samples[:_NAMED_SAMPLES]]
        others = f" and {len(samples) - len(where)} more" if len(samples) > len(where) else ""
        return f"step {step} of epoch {epoch} ({'; '.join(where)}{others})"


@contextmanager
def naming_ray(cluster: RayCluster | None) -> Iterator[None]:
    """Inside, the end of the worker that speaks to Ray is told as what it most likely is.

    Raises:
        DataError: it has ended: Ray ends whoever was connected to it.
    """
    try:
        yield
    except RuntimeError as error:
        if cluster is None or not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"Ray at {cluster.address} was lost, or the process that asks it for steps: {error} Start Ray again, and "
            "resume from the last checkpoint."
        ) from error


class StepsOrigin(NamedTuple):
    """A rank's steps, for its producers.

    Attributes:
        steps: the reference to them. In a list, since Ray would send what it refers to along with each call.
        folder: in which paths are given.
        versions: of packages in the rank.
    """

    steps: list[Any]
    folder: str
    versions: dict[str, str]


class Producer:
    """Makes steps of one rank; an actor, which Ray starts anew where it dies."""

    def __init__(self) -> None:
        self._steps: StepDataset | None = None

    def produce(self, origin: StepsOrigin, epoch: int, step: int, packing: StepPacking) -> tuple[Any, ...]:
        """The parts of a step's `SharedMemoryBatch`, the seconds that it took, and the error if there is none."""
        began = time.perf_counter()
        try:
            steps = self._steps or self._opened(origin)
            batch = steps[epoch, step, packing]
        except DataError as error:
            return None, None, None, None, 0.0, str(error)
        seconds = time.perf_counter() - began
        if batch is None:
            return None, None, None, None, seconds, None
        return batch.body, batch.block.numpy(), batch.layout, batch.stream, seconds, None

    def _opened(self, origin: StepsOrigin) -> StepDataset:
        """The rank's steps; first what would make them others is refused.

        Raises:
            DataError: this node has other versions, or not the folder.
        """
        import ray

        own = versions()
        if unlike := [name for name in own if own[name] != origin.versions.get(name)]:
            told = ", ".join(
                f"{name} {own[name] or 'none'} (rank: {origin.versions.get(name) or 'none'})" for name in unlike
            )
            raise DataError(
                f"The producer on {platform.node()} would make other steps than the rank, since it has {told}. Install "
                "the same versions on all nodes of the Ray cluster."
            )
        try:
            os.chdir(origin.folder)
        except OSError as error:
            raise DataError(
                f"The producer on {platform.node()} cannot read what the rank reads: {error}. All nodes of the Ray "
                "cluster must have the same folders."
            ) from error
        torch.set_num_threads(1)
        self._steps = ray.get(origin.steps[0])
        return self._steps


def versions() -> dict[str, str]:
    """Package -> its version here, without the part that names processors; empty if it is not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _DECISIVE:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = ""
    return found
