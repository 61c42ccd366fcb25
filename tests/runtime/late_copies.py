"""Streams whose copies come late: whoever reads a copy before it is handed over reads what was there before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flowtrain_lightning.compute.copy_stream import CopyStream


class LateCopies(CopyStream):
    """A stream that is given copies, and remembers which tensors the computing stream has waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_late = True
        self.is_copying = False
        self.handed_over: list[Tensor] = []  # kept, so that no other tensor is ever taken for one of them

    @contextmanager
    def copying(self) -> Iterator[None]:
        assert not self.is_copying
        self.is_copying = True
        yield
        self.is_copying = False

    def hand_over(self, tensors: Iterable[Tensor | None]) -> None:
        self.handed_over += [tensor for tensor in tensors if tensor is not None]


def read_after_copies(streams: Sequence[LateCopies], tensors: Iterable[Tensor | None]) -> None:
    """What the computing stream does with copies; fails where a read is not ordered after its write."""
    for tensor in tensors:
        there = any(_is_of(tensor, each) for stream in streams for each in stream.handed_over)
        assert tensor is None or not len(tensor) or there, "a copy is read that the computing stream has not waited for"


def _is_of(tensor: Tensor | None, whole: Tensor) -> bool:
    """Whether it is that tensor, or rows of it."""
    return tensor is not None and tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
