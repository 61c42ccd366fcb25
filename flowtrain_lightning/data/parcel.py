"""How a step travels from a worker to its rank: all its tensors in one block of memory."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.data.batch import StepBatch
from flowtrain_lightning.packing.sample_stream import StreamState

_ALIGNMENT = 64


@dataclass(frozen=True)
class SharedMemoryBatch:
    """A :class:`StepBatch` with its tensors side by side in one block.

    A tensor sent between processes costs a file descriptor and pinning one costs a call, so a step of many
    microbatches sent as it is could meet the limit of open files.

    Attributes:
        body: the pickled batch, with references in place of tensors.
        block: ``[bytes]`` uint8, all tensors.
        places: offset, dtype and shape of every tensor.
        stream: where the stream of samples stands after this step, where steps are cut from one.
    """

    body: bytes
    block: Tensor
    places: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    stream: StreamState | None = None

    @classmethod
    def of(cls, batch: StepBatch, stream: StreamState | None = None) -> SharedMemoryBatch:
        """Pack a batch; its ``following`` stays behind."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        fields = (batch.plan, batch.part, batch.microbatches, batch.encoder_batches, batch.epoch, batch.step)
        pickler.dump(fields)
        places, end = [], 0
        for tensor in pickler.tensors:
            places.append((end, tensor.dtype, tuple(tensor.shape)))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        block = torch.empty(end, dtype=torch.uint8)
        for place, tensor in zip(places, pickler.tensors, strict=True):
            _view(block, *place).copy_(tensor)
        return cls(file.getvalue(), block, tuple(places), stream)

    def open(self) -> StepBatch:
        """The batch; its tensors are views of the block."""
        unpickler = _Unpickler(io.BytesIO(self.body))
        unpickler.tensors = [_view(self.block, *place) for place in self.places]
        return StepBatch(*unpickler.load())

    def pin_memory(self) -> SharedMemoryBatch:
        """The same parcel in page-locked memory."""
        return replace(self, block=self.block.pin_memory())


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
