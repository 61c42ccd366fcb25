"""Tensor parallelism: the ranks of a group hold a share of each layer, and compute the same microbatches together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowtrain_lightning.parallel.engine import HalfEngine, StepRecord
from flowtrain_lightning.parallel.gradients import local_part


class TensorParallelHalf:
    """A half whose layers are divided among tensor ranks, in any layout of its data-parallel ranks; see `HalfEngine`.

    Gradients of divided layers, and of whole ones that see what all ranks see, are right as autograd leaves them. Those
    of norms that see a rank's share, of the heads or of the tokens, are summands.

    Args:
        across: what data-parallel ranks do with what this rank holds.
        summed: owner and name of each parameter of which every tensor rank has a summand of the gradient.
        mesh: the tensor ranks, in one dimension.
    """

    in_lockstep = True

    def __init__(self, across: HalfEngine, summed: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
        self.parameters = across.parameters
        self._across = across
        self._summed = [owner.get_parameter(name) for owner, name in summed]
        self._mesh = mesh

    @property
    def record(self) -> StepRecord:
        """As of the layout of the data-parallel ranks: ranks of this one see the same samples."""
        return self._across.record

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return self._across.trains

    def begin_step(self) -> None:
        """Before the first forward of a step that trains."""
        self._across.begin_step()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward, together with the other tensor ranks."""
        return self._across.call(function, *args)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Inside, one backward runs, together with the other tensor ranks."""
        return self._across.backward(last=last)

    def send_gradients(self) -> None:
        """After the step's last backward on this rank."""
        self._across.send_gradients()

    def finish_gradients(self, scale: float) -> None:
        """Sums over data-parallel ranks, and over tensor ranks what each has a summand of."""
        self._across.finish_gradients(scale)
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in self._summed:
            if parameter.grad is not None:
                by_dtype[parameter.grad.dtype].append(local_part(parameter.grad))
        for parts in by_dtype.values():  # many and small: they go together
            flat = torch.cat([part.reshape(-1) for part in parts]).to(self._mesh.device_type)
            dist.all_reduce(flat, group=self._mesh.get_group())
            for part, total in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients over all ranks of the role."""
        return self._across.squared_norm(gradients)
