"""The loader that Lightning iterates: steps in order, resumable in mid-epoch, with a look ahead."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from flowtrain_lightning.data.batch import StepBatch
from flowtrain_lightning.data.features.feature_keeping import FeatureKeeping
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.data.loading.delivery import Delivery, Prepare, PrepareMedia, next_batch, with_inputs
from flowtrain_lightning.data.loading.workers import SharedMemoryBatch, WorkerStart, fork_lock, telling_full_memory
from flowtrain_lightning.data.media.large_media import LargeMedia
from flowtrain_lightning.data.producers.loading_pace import LoadingPace
from flowtrain_lightning.data.producers.producers import ProducedSteps
from flowtrain_lightning.data.producers.ray_cluster import RayCluster
from flowtrain_lightning.data.steps.sampler import StepSampler
from flowtrain_lightning.data.steps.step_packing import CostChange

_PREFETCHED = 2
"""Steps that each worker plans and loads ahead."""

LOADING_THREAD = "load the next step"
"""Begins the name of the thread that brings the next batch."""


class StepLoader:
    """Steps of an epoch in order.

    Of a stream the length is not known, and ``len`` raises a TypeError. A batch of it counts as trained on once the
    next one was asked for, as Lightning does with such loaders.

    While a step runs, a thread plans and loads the next one, or takes it from the workers that did, and prepares it.

    Wraps a PyTorch ``DataLoader`` and is none, so that Lightning neither puts a sampler of its own into it nor
    builds it anew. Its iterators begin to read when the first batch is asked for: Lightning asks for an iterator
    before it sets the epoch. One iterator is in use at a time.

    Args:
        steps: the steps.
        files: fingerprints of the data's files; kept in the state.
        num_workers: processes that load; with 0 the training process loads. They live until :meth:`close`.
        cluster: the Ray whose producers load; None: ``num_workers`` load.
        pin_memory: batches lie in page-locked memory.
        prepare: called with every batch, in the thread that loads; the result is the batch's ``program``.
        prepare_media: called with every encoder batch, in that thread; the result is its ``inputs``.
        keeping: says, when an epoch begins, where features are kept; None: nowhere.
        trainer: that trains on the steps, and knows where the epochs of a stream end; None: nobody trains.

    Attributes:
        pace: how long the rank waits for its steps.
    """

    batch_sampler = None
    """Lightning reads it of every loader that has a sampler."""

    def __init__(
        self,
        steps: StepDataset,
        *,
        files: Sequence[str],
        num_workers: int = 0,
        cluster: RayCluster | None = None,
        pin_memory: bool = False,
        prepare: Prepare | None = None,
        prepare_media: PrepareMedia | None = None,
        keeping: FeatureKeeping | None = None,
        trainer: L.Trainer | None = None,
    ) -> None:
        self.steps = steps
        self.sampler = StepSampler(steps.sampling.steps, steps.packing)
        self._files = list(files)
        self._resume: tuple[int, int] | None = None
        self._done = _Position(0, 0, None)
        self._large_media = LargeMedia(cut=steps.cuts_media)
        self._delivered_last: _Position | None = None
        self._num_workers = num_workers
        self._cluster = cluster
        self.pace = LoadingPace(steps.shard, None if cluster is None else cluster.producers)
        self._pin_memory = pin_memory
        self._prepare = prepare
        self._prepare_media = partial(with_inputs, prepare_media, pin_memory) if prepare_media is not None else None
        self._keeping = keeping
        self._trainer = trainer
        self._is_limited = isinstance(getattr(trainer, "limit_train_batches", None), int)
        self._loader: DataLoader[SharedMemoryBatch | None] | None = None
        self._produced: ProducedSteps | None = None
        self._reading: weakref.ref[_StepIterator] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._coming: Future[Delivery | None] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepBatch]:
        return _StepIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches that were delivered, and the settings on which this rests.

        All in JSON types: ``settings`` decide which samples are in a step, ``packing`` how they are packed, and
        ``changes`` name the cost models that have replaced or will replace those in ``packing``.
        """
        epoch, step = self._resume or self._done[:2]
        return {
            "epoch": epoch,
            "step": step,
            "settings": self._settings_of(self.steps),
            "packing": self.steps.packing.state_dict(),
            "changes": [change.state_dict() for change in self.sampler.changes],
            "stream": self._done.stream,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken: the epoch that it names begins after the batches delivered then.

        Settings that the user has not set are those of the state.

        Raises:
            ValueError: the state was taken with other settings.
        """
        if told := self.differences(state):
            raise ValueError(
                f"The checkpoint's position in the data means other samples now: {told}. "
                "Use the settings and files it was made with, or start a new run from its weights."
            )
        steps = self.steps.resumed_from(state)
        if told := _changes(state["packing"], steps.packing.state_dict()):
            rank_zero_info(f"flowtrain: the same samples as before, in every step, are packed otherwise: {told}.")
        self.close()
        self.steps = steps
        self.sampler.steps, self.sampler.packing = steps.sampling.steps, steps.packing
        if "cost" in steps.unset_settings:
            self.sampler.changes = [CostChange.from_state(change) for change in state["changes"]]
        self._done = _Position(int(state["epoch"]), int(state["step"]), state["stream"])
        self._delivered_last = None
        self._resume = self._done[:2]
        self.sampler.set_epoch(self._resume[0])

    def differences(self, state: Mapping[str, Any]) -> str:
        """Settings and files that make ``state`` select other samples than here, listed in words; empty if none do."""
        saved, own = state["settings"], self._settings_of(self.steps)
        if saved.get("batch_unit") != own["batch_unit"]:
            return _changes(saved, own)  # a position of another kind, which these steps cannot take over
        return _changes(saved, self._settings_of(self.steps.resumed_from(state)))

    def change_costs(self, change: CostChange) -> None:
        """Pack with other costs from a step on. Every rank calls it alike, before anyone has planned that step.

        Raises:
            ValueError: the step, or a later one, was planned already, or is to change already.
        """
        changes = self.sampler.changes
        latest = max([self.sampler.planned, *(other.position for other in changes[-1:])])
        if change.position <= latest:
            raise ValueError(
                f"Costs were to change in step {change.step} of epoch {change.epoch}, but what holds in step "
                f"{latest[1]} of epoch {latest[0]} is settled; name a later step."
            )
        begun = [other for other in changes if other.position <= (self._resume or self._done[:2])]
        self.sampler.changes = [*begun[-1:], *changes[len(begun) :], change]  # those before the last are over

    @property
    def planned_ahead(self) -> int:
        """Steps, at most, that are planned beyond the last one that was asked for."""
        return 1 + _PREFETCHED * self._num_workers if self._cluster is None else ProducedSteps.ahead(self._cluster)

    def close(self) -> None:
        """End thread and workers. A later iterator starts new ones."""
        self._release()
        self._stop(waits=True)

    def abandon(self) -> None:
        """End thread and workers without waiting for a load that is under way: for a run that has failed."""
        self._reading = self._coming = None
        self._stop(waits=False)

    def _stop(self, *, waits: bool) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=waits, cancel_futures=True)
            self._thread = None
        self._forget_loader()

    def _forget_loader(self) -> None:
        # The DataLoader's own iterator ends its workers when nothing refers to it any more.
        self._loader = None
        if self._produced is not None:
            self._produced.close()
            self._produced = None

    def _release(self) -> None:
        """End the iterator in use."""
        reading = None if self._reading is None else self._reading()
        if reading is not None:
            reading.close()
        self._reading = None
        if self._coming is not None:
            wait([self._coming])  # else the thread would go on reading from an iterator that begins anew
            self._coming = None

    def _load_next(self, batches: Iterator[SharedMemoryBatch | None]) -> Future[Delivery | None]:
        """Let the thread bring the next batch, or None at the epoch's end."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=LOADING_THREAD)
        self._coming = self._thread.submit(next_batch, batches, self._prepare, self._prepare_media)
        return self._coming

    def _start(self, iterator: _StepIterator) -> Iterator[SharedMemoryBatch | None]:
        """Begin to read the epoch that the sampler names, for this iterator."""
        self._release()
        self._reading = weakref.ref(iterator)
        epoch = self.sampler.epoch
        self.sampler.first = self._resume[1] if self._resume is not None and self._resume[0] == epoch else 0
        self._resume = None
        self._done = _Position(epoch, self.sampler.first, self._done.stream)
        self._delivered_last = None
        if self._keeping is not None and (stores := self._keeping.stores()) != self.steps.stores:
            self._forget_loader()  # its workers know the former ones
            self.steps = replace(self.steps, stores=stores)
        return self._iterate()

    def _start_next_epoch(self) -> Iterator[SharedMemoryBatch | None] | None:
        """Go on with the next epoch where a stream was resumed at its end; None where it was not.

        Lightning, too, begins the next epoch then, but with the iterator of which it has asked a batch already. It asks
        for none ahead where it takes a limited number: there the epoch ends. So it does where it was saved under such a
        limit, and Lightning, which did not see its end, goes on in it.
        """
        is_foreseen = self.sampler.steps is not None or self._is_limited
        if is_foreseen or self.sampler.first == 0 or self._delivered_last is not None:
            return None
        if self._trainer is not None and not self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return None
        self.sampler.set_epoch(self.sampler.epoch + 1)
        self.sampler.first = 0
        self._done = _Position(self.sampler.epoch, 0, None)
        return self._iterate()

    def _iterate(self) -> Iterator[SharedMemoryBatch | None]:
        if self._cluster is not None:
            if self._produced is None:
                self._produced = ProducedSteps(self.steps, self._cluster, pin_memory=self._pin_memory)
            return self._produced.iterate(self.sampler)
        if self._loader is None:
            self._loader = self._build()
        if not self._num_workers:
            return iter(self._loader)
        with fork_lock.forking(), telling_full_memory(self._num_workers):
            return iter(self._loader)

    def _build(self) -> DataLoader[SharedMemoryBatch | None]:
        return DataLoader(
            self.steps,
            batch_size=None,
            sampler=self.sampler,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            prefetch_factor=_PREFETCHED if self._num_workers else None,
            persistent_workers=self._num_workers > 0,
            worker_init_fn=WorkerStart(self._num_workers),
            # A generator of its own: the loader must not draw from the stream that the model's dropout reads.
            generator=torch.Generator(),
        )

    def _delivered(self, delivery: Delivery) -> None:
        steps, sizes = self.steps, delivery.batch.plan.sizes
        self._large_media.tell(sizes, steps.packing.encoder_budget, steps.most_patches())
        if self._keeping is not None:
            self._keeping.count(delivery.batch.media)
        position = _Position(delivery.batch.epoch, delivery.batch.step + 1, delivery.stream)
        if self.sampler.steps is not None or self._is_limited:
            self._done = position
            if self._keeping is not None and position.step == self.sampler.steps:
                self._keeping.end_epoch()
            return
        # Whoever does not know how many batches come, or how many he takes, asks for the next one before he trains on
        # the one that he has.
        self._done = self._delivered_last or self._done
        self._delivered_last = position

    def _has_ended(self) -> None:
        self._done = self._delivered_last or self._done
        self._delivered_last = None

    def _settings_of(self, steps: StepDataset) -> dict[str, Any]:
        return {"files": self._files, **steps.sampling.state_dict()}


class _StepIterator(Iterator[StepBatch]):
    """One epoch's batches. A lane's thread may look ahead while another thread takes the next batch."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader: StepLoader | None = loader
        self._batches: Iterator[SharedMemoryBatch | None] | None = None
        self._coming: Future[Delivery | None] | None = None
        self._ahead: deque[Delivery] = deque()
        self._latest: StepBatch | None = None  # of a stream, which is delivered while the one before it runs
        self._next = 0
        self._lock = threading.Lock()

    def __next__(self) -> StepBatch:
        with self._lock:
            if self._loader is None:
                raise RuntimeError("This iterator ended when another one of the same StepLoader began; use that one.")
            self._loader.pace.asked()
            if not self._look_ahead(1):
                self._loader._has_ended()
                raise StopIteration
            delivery = self._ahead.popleft()
            self._next = delivery.batch.step + 1
            self._latest = delivery.batch if self._loader.sampler.steps is None else None
            self._loader._delivered(delivery)
            self._loader.pace.given(delivery.seconds, len(delivery.batch.plan.samples))
            return delivery.batch

    def close(self) -> None:
        """Let go of the workers and of what was loaded."""
        with self._lock:
            self._loader = self._batches = self._coming = self._latest = None
            self._ahead.clear()

    def following(self, step: int) -> StepBatch | None:
        """The batch of this step, which stays in the queue, or None past the end or once closed.

        Of a stream it may have been delivered last: Lightning asks for one more than it trains on, to know the end.
        """
        with self._lock:
            distance = step - self._next
            if self._latest is not None and self._latest.step == step:
                return self._latest
            if distance < 0:
                raise LookupError(f"Step {step} was delivered already; the next one is {self._next}.")
            return self._ahead[distance].batch if self._look_ahead(distance + 1) else None

    def _look_ahead(self, count: int) -> bool:
        """Have so many batches in the queue, and one more on its way; False if the epoch has no more."""
        if self._loader is None:
            return False
        if self._batches is None:
            self._batches = self._loader._start(self)
        while len(self._ahead) < count:
            coming = self._coming or self._loader._load_next(self._batches)
            self._coming = None  # whatever comes of it: after an error the next call tries what follows
            delivery = coming.result()
            if delivery is None:
                next_epoch = self._loader._start_next_epoch()
                if next_epoch is None:
                    return False
                self._batches = next_epoch
                continue
            # A weak reference: batches in the queue must not keep the iterator, and with it the workers, alive.
            delivery.batch.following = _Following(weakref.ref(self), delivery.batch.step)
            self._ahead.append(delivery)
        self._coming = self._coming or self._loader._load_next(self._batches)
        return True


class _Position(NamedTuple):
    """An epoch, how many of its steps were delivered, and where the stream of samples stood then, if there is one."""

    epoch: int
    step: int
    stream: dict[str, Any] | None


class _Following:
    def __init__(self, iterator: weakref.ref[_StepIterator], step: int) -> None:
        self._iterator = iterator
        self._step = step

    def __call__(self, distance: int) -> StepBatch | None:
        iterator = self._iterator()
        return None if iterator is None else iterator.following(self._step + distance)


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    if "batch_unit" in changed:
        changed = ["batch_unit"]  # the others follow from it
    return "; ".join(f"{name} was {saved.get(name)}, is {now.get(name)}" for name in changed)
