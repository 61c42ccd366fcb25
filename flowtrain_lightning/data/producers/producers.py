"""Steps that producers make: actors of Ray, on nodes of a cluster or on this machine, a number of steps ahead.

Only a process beside the rank speaks to Ray, see `ray_client.py`: what becomes of Ray does not become of the rank.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.data.loading.workers import SharedMemoryBatch
from flowtrain_lightning.data.producers import ray_client
from flowtrain_lightning.data.producers.ray_cluster import RUN, RayCluster
from flowtrain_lightning.data.producers.step_maker import FailedStep, MadeStep, StepsOrigin, versions
from flowtrain_lightning.data.steps.step_packing import StepPacking

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_AHEAD = 2
"""Steps that each producer has: one that it makes, and the next."""

_RETRIES = 3
"""How often a step is made anew, at most, because its producer died."""

SLOW_SECONDS = 60.0
"""After so long a step that is awaited is named in the log, and again each time."""

LONGEST_SECONDS = 1800.0
"""After so long it ends the run."""

_NAMED_SAMPLES = 8

_LOST_SECONDS = 5
"""After which a cluster whose head does not answer is lost, for whoever asks it for steps."""

StepKey = tuple[int, int, StepPacking]
"""Epoch, number and packing of a step."""


class ProducedSteps:
    """A rank's steps, made by producers. They begin with the first one, and last until :meth:`close`.

    Args:
        steps: the rank's part of each step.
        cluster: the Ray on which producers run.
        pin_memory: steps lie in page-locked memory.
    """

    def __init__(self, steps: StepDataset, cluster: RayCluster, *, pin_memory: bool = False) -> None:
        self._steps = steps
        self._cluster = cluster
        self._pin_memory = pin_memory
        self._client: _Client | None = None
        self._received = 0

    @staticmethod
    def ahead(cluster: RayCluster) -> int:
        """Steps that producers have for each loader, at most: this bounds what waits for it."""
        return _AHEAD * cluster.producers

    def iterate(self, keys: Iterable[StepKey]) -> Iterator[SharedMemoryBatch | None]:
        """Steps in this order; what an iterator before it had begun is forgotten."""
        return _Produced(self, keys)

    def close(self) -> None:
        """End the process that asks for steps, and with it the producers."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def ask(self, key: StepKey, begun: list[StepKey], *, anew: bool) -> SharedMemoryBatch | None:
        """The step that was begun first, among those that are begun now and before.

        Args:
            key: of that step.
            begun: those that follow what was begun before.
            anew: nothing that was begun before is meant any more.

        Raises:
            DataError: a record cannot be used, a step cannot be made, or Ray is lost.
        """
        client = self._client = self._client or self._connected()
        try:
            client.send((anew, [pickle.dumps(each) for each in begun]))
            self._wait_for(client, key)
            answer, block = client.receive()
        except (EOFError, OSError) as error:
            raise DataError(
                f"Ray at {self._cluster.address} was lost, or the process that asks it for steps ({error!r}). Start "
                "Ray again, and resume from the last checkpoint."
            ) from error
        match answer:
            case "unconnected", told:
                raise DataError(f"The loader cannot connect to Ray at {self._cluster.address}: {told}")
            case "lost", told:
                raise DataError(f"Producers could not make {self._named(key)}: {told}")
        found: MadeStep | FailedStep = pickle.loads(answer[1])
        if isinstance(found, FailedStep):
            where = DataError(found.told)
            raise (where if found.error is None else found.error) from where
        self._received += 1
        if found.parts is None:
            return None
        batch = found.parts.with_block(block, found.seconds)
        return batch.pin_memory() if self._pin_memory else batch

    def _connected(self) -> _Client:
        # Functions of the user's script are sent as they are: nobody else can import them.
        from ray import cloudpickle  # type: ignore[attr-defined]

        connecting: dict[str, Any] = {}
        if not self._cluster.is_local:
            found_here = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
            connecting = {"runtime_env": {"env_vars": {"PYTHONPATH": found_here}}}
        actor = {
            "num_cpus": self._cluster.share,
            "max_restarts": -1,
            "max_task_retries": _RETRIES,
            "scheduling_strategy": "SPREAD",
        }
        origin = pickle.dumps(StepsOrigin(os.getcwd(), versions(), cloudpickle.dumps(self._steps)))
        client = _Client(self._cluster)
        client.start(
            {
                "address": self._cluster.address,
                "connecting": connecting,
                "count": self._cluster.producers,
                "actor": actor,
                "origin": origin,
            }
        )
        return client

    def _wait_for(self, client: _Client, key: StepKey) -> None:
        """Until an answer is there; say what has not come, and give up at some time.

        Raises:
            DataError: it was waited for too long.
        """
        began = time.monotonic()
        while not client.answers_within(SLOW_SECONDS):
            seconds = time.monotonic() - began
            told = f"Producers have not made {self._named(key)} within {seconds:.0f} s."
            if not self._received:
                told += " None has made any: see `ray status` for free processors."
            if seconds >= LONGEST_SECONDS:
                self.close()  # whose answers would be taken for others
                raise DataError(f"{told} The run ends here; leave slow records out, or move their files nearer.")
            _log.warning(told)

    def _named(self, key: StepKey) -> str:
        """A step, with the records that this rank needs of it."""
        epoch, step, packing = key
        samples = self._steps.needed(self._steps.plan(epoch, step, packing))
        where = [self._steps.samples.where(sample) for sample in samples[:_NAMED_SAMPLES]]
        others = f" and {len(samples) - len(where)} more" if len(samples) > len(where) else ""
        return f"step {step} of epoch {epoch} ({'; '.join(where)}{others})"


class _Produced(Iterator[SharedMemoryBatch | None]):
    """Steps in order. After an error the next one is what follows."""

    def __init__(self, source: ProducedSteps, keys: Iterable[StepKey]) -> None:
        self._source = source
        self._keys = iter(keys)
        self._begun: deque[StepKey] = deque()
        self._anew = True

    def __next__(self) -> SharedMemoryBatch | None:
        following = list(islice(self._keys, self._source.ahead(self._source._cluster) - len(self._begun)))
        self._begun.extend(following)
        if not self._begun:
            raise StopIteration
        anew, self._anew = self._anew, False
        return self._source.ask(self._begun.popleft(), following, anew=anew)


class _Client:
    """The process that speaks to Ray, as the rank has it. It is no fork, as it has Ray's threads.

    Args:
        cluster: the Ray.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._link, theirs = socket.socketpair()
        environment = {**os.environ, **cluster.environment, _LOST_SETTING: f"{_LOST_SECONDS}"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN, ray_client.__file__, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # what interrupts the run reaches it through its rank
        )
        theirs.close()
        self._connection = Connection(os.dup(self._link.fileno()))

    def start(self, settings: dict[str, Any]) -> None:
        """Let it connect to Ray, and start producers."""
        self._connection.send_bytes(pickle.dumps(settings))

    def send(self, asked: tuple[bool, list[bytes]]) -> None:
        """Ask for the next step."""
        self._connection.send(asked)

    def answers_within(self, seconds: float) -> bool:
        """Whether an answer has come in this time."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[tuple[Any, ...], Tensor]:
        """What became of a step, and ``[bytes]`` uint8, its tensors as they lie in that process's memory."""
        answer: tuple[Any, ...] = self._connection.recv()
        if answer[0] != "made" or not answer[2]:
            return answer, torch.empty(0, dtype=torch.uint8)
        _, descriptors, _, _ = socket.recv_fds(self._link, len(ray_client.MEMORY), 1)
        if not descriptors:
            raise EOFError("it ended meanwhile")
        try:
            return answer, torch.frombuffer(mmap.mmap(descriptors[0], answer[2]), dtype=torch.uint8)
        finally:
            os.close(descriptors[0])

    def close(self) -> None:
        """End it; whoever waits for its answer finds its end."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def __del__(self) -> None:
        if hasattr(self, "_process") and self._process.returncode is None:
            self.close()


_LOST_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
