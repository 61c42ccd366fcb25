"""Tensor parallelism: the ranks of a group hold a share of each layer, and compute the same microbatches together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowtrain_lightning.parallel.engine import HalfEngine, StepRecord
from flowtrain_lightning.parallel.equal_copies import (
    EqualCopies,
    forgotten_in_plan,
    needless_in_plan,
    unequal_weights,
    whole_on_tensor_ranks,
)
from flowtrain_lightning.parallel.gradients import local_part


class TensorParallelHalf:
    """A half whose layers are divided among tensor ranks, in any layout of its data-parallel ranks; see `HalfEngine`.

    Gradients of divided layers, and of whole ones that see what all ranks see, are right as autograd leaves them. Those
    of norms that see a rank's share, of the heads or of the tokens, are summands.

    Args:
        across: what data-parallel ranks do with what this rank holds.
        summed: owner and name of each parameter of which every tensor rank has a summand of the gradient.
        mesh: the tensor ranks, in one dimension.
        names: path -> parameter of the half, for messages.
    """

    in_lockstep = True

    def __init__(
        self,
        across: HalfEngine,
        summed: Sequence[tuple[nn.Module, str]],
        mesh: DeviceMesh,
        names: Mapping[str, nn.Parameter],
    ) -> None:
        self.parameters = across.parameters
        self._across = across
        self._summed = [owner.get_parameter(name) for owner, name in summed]
        self._mesh = mesh
        self._whole = {name: weight for name, weight in names.items() if whole_on_tensor_ranks(weight)}
        added = {id(weight) for weight in self._summed}
        self._parts = {name: weight for name, weight in names.items() if id(weight) in added}
        self._copies: EqualCopies | None = None  # nothing is compared outside of a run
        self._summands: EqualCopies | None = None
        self._begins = False

    def begin_run(self) -> None:
        """Lets the first steps from now on compare what tensor ranks hold alike."""
        self._copies = EqualCopies(self._whole, self._mesh.get_group(), self._mesh.device_type)
        self._summands = EqualCopies(self._parts, self._mesh.get_group(), self._mesh.device_type)
        self._begins = True

    @property
    def record(self) -> StepRecord:
        """As of the layout of the data-parallel ranks: ranks of this one see the same samples."""
        return self._across.record

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return self._across.trains

    def begin_step(self) -> None:
        """Before the first forward of a step that trains.

        Raises:
            ValueError: before the first step of a run weights differ that tensor ranks should hold alike.
        """
        if self._copies is not None and self._begins:
            self._begins = False
            if found := self._copies.compare_weights():
                raise ValueError(unequal_weights(found))
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
        """Sums over data-parallel ranks, and over tensor ranks what each has a summand of.

        Raises:
            ValueError: in the first steps, gradients of a weight differ that tensor ranks hold whole; or summands of
                one are equal, so that they are none.
        """
        self._across.finish_gradients(scale)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self._summands is not None and (names := self._summands.equal_gradients(gradients)):
            raise ValueError(needless_in_plan(names))
        self.sum_shares()
        if self._copies is not None and (found := self._copies.compare_gradients(gradients)):
            raise ValueError(forgotten_in_plan(found))

    def sum_shares(self) -> None:
        """Sums over tensor ranks the gradients of which each has a summand."""
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
