"""Worker processes of a loader: how they are forked, how they end, and how a step travels from one to its rank."""

from __future__ import annotations

import ctypes
import errno
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.data.batch import StepBatch
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.loading.freed_memory import keep_freed_memory
from flowtrain_lightning.data.loading.worker_channels import WorkerChannel, channel

_ALIGNMENT = 64
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


@dataclass(frozen=True)
class SharedMemoryBatch:
    """A :class:`StepBatch` with its tensors side by side in one block.

    A tensor sent between processes costs a file descriptor and pinning one costs a call, so a step of many
    microbatches that is sent as it is could reach the limit of open files.

    Attributes:
        body: the pickled batch, with references instead of tensors.
        block: ``[bytes]`` uint8, all tensors.
        layout: offset in bytes, dtype and shape of every tensor.
        stream: where the stream of samples stands after this step, where steps are cut from one; in JSON types.
        seconds: that a producer took to make it; None where none did.
    """

    body: bytes
    block: Tensor
    layout: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    stream: dict[str, Any] | None = None
    seconds: float | None = None

    def open(self) -> StepBatch:
        """The batch; its tensors are views of the block."""
        unpickler = _Unpickler(io.BytesIO(self.body))
        unpickler.tensors = [_view(self.block, *where) for where in self.layout]
        return StepBatch(*unpickler.load())

    def pin_memory(self) -> SharedMemoryBatch:
        """The same batch in page-locked memory."""
        return replace(self, block=self.block.pin_memory())


class PackedParts(NamedTuple):
    """A :class:`StepBatch` taken apart, before its tensors lie side by side.

    Attributes:
        body: the pickled batch, with references instead of tensors.
        layout: offset in bytes, dtype and shape of every tensor.
        nbytes: of the block in which they will lie.
        tensors: the tensors.
        stream: where the stream of samples stands after this step, where steps are cut from one; in JSON types.
    """

    body: bytes
    layout: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    nbytes: int
    tensors: tuple[Tensor, ...]
    stream: dict[str, Any] | None

    @classmethod
    def of(cls, batch: StepBatch, stream: dict[str, Any] | None = None) -> PackedParts:
        """A batch; its ``following`` and ``program`` stay behind, as they belong to the rank's process."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        parts = (batch.plan, batch.shard, batch.microbatches, batch.media)
        pickler.dump((*parts, batch.epoch, batch.step, batch.padding_media))
        layout, end = [], 0
        for tensor in pickler.tensors:
            layout.append((end, tensor.dtype, tuple(tensor.shape)))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(file.getvalue(), tuple(layout), end, tuple(pickler.tensors), stream)

    def packed(self) -> SharedMemoryBatch:
        """The batch, with its tensors in one block."""
        block = torch.empty(self.nbytes, dtype=torch.uint8)
        for where, tensor in zip(self.layout, self.tensors, strict=True):
            _view(block, *where).copy_(tensor)
        return self.with_block(block)

    def with_block(self, block: Tensor, seconds: float | None = None) -> SharedMemoryBatch:
        """The batch, whose tensors somebody has put into a block."""
        return SharedMemoryBatch(self.body, block, self.layout, self.stream, seconds)


class ForkLock:
    """Either threads load, or one forks.

    A fork has only the thread that made it, but every lock as it was at that moment: what another thread held then, a
    lock of numpy, numba or the interpreter, is never released in the fork, which hangs as soon as it wants it.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._loading = 0
        self._forking = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, this process does not fork; waits while it does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._loading += 1
        try:
            yield
        finally:
            with self._changed:
                self._loading -= 1
                self._changed.notify_all()

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Inside, no thread loads; waits until those that load are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._forking = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._loading)
            yield
        finally:
            with self._changed:
                self._forking = False
                self._changed.notify_all()


fork_lock = ForkLock()
"""The lock of this process."""


_own_channel: WorkerChannel | None = None
"""In a worker: what it sends its steps through."""


class WorkerStart:
    """Prepares each worker of a loader; a ``worker_init_fn``.

    Where workers are not forked, or there is no memory without a name, as on a Mac, steps travel in PyTorch's own way.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        forks = multiprocessing.get_start_method() == "fork"
        has_channels = forks and hasattr(os, "memfd_create")
        self._channels = [WorkerChannel() for _ in range(workers)] if has_channels else []

    def __call__(self, worker: int) -> None:
        """Called in the process of the worker of this number."""
        global _own_channel
        _own_channel = self._channels[worker] if self._channels else None
        keep_freed_memory()
        end_with_starter()


def _reduce(batch: SharedMemoryBatch) -> Any:
    """Pickles a batch for another process: a worker sends its block through the channel."""
    if _own_channel is None or not batch.block.numel():
        return batch.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    sent = (_own_channel.number, _own_channel.send(batch.block), batch.block.numel())
    return _receive, (sent, batch.body, batch.layout, batch.stream, batch.seconds)


def _receive(sent: tuple[int, int, int], body: bytes, *others: Any) -> SharedMemoryBatch:
    number, token, nbytes = sent
    return SharedMemoryBatch(body, channel(number).receive(token, nbytes), *others)


ForkingPickler.register(SharedMemoryBatch, _reduce)


@contextmanager
def telling_full_memory(workers: int) -> Iterator[None]:
    """Inside workers are started: says so where /dev/shm has no room for the semaphores that they need.

    Raises:
        DataError: with the bytes that are free.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        memory = os.statvfs("/dev/shm")
        raise DataError(
            f"The loader's worker processes ({workers}) cannot be started: their semaphores lie in /dev/shm, of whose "
            f"{memory.f_blocks * memory.f_frsize:,} bytes {memory.f_bavail * memory.f_frsize:,} are free. Remove what "
            "fills it, enlarge it (docker run --shm-size=1g, mount -o remount,size=1G /dev/shm), or set "
            "FlowDataModule(num_workers=0)."
        ) from error


def end_with_starter() -> None:
    """Let this worker end when the thread that started it does.

    PyTorch's workers notice a dead parent after seconds, and not while they load; the kernel tells them at once. It
    counts the thread that started them as their parent: for a Trainer, the one that runs its loop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _view(block: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    length = dtype.itemsize * torch.Size(shape).numel()
    return block[offset : offset + length].view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    tensors: list[Tensor]

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]
