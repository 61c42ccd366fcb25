"""One stage of a half: its gradients are those of its layout, and what stages share they sum, and count once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowtrain_lightning.parallel.engine import HalfEngine, StepRecord
from flowtrain_lightning.parallel.gradients import local_part


class StagedHalf:
    """A stage in its own layout; see `HalfEngine`.

    Args:
        inner: the layout of the stage.
        ties: parameters that the first and the last stage both hold, in one order; none on other stages.
        ends: the ranks of both that hold the same of them.
        column: the ranks of all stages that compute on the same samples, and hold the same share of every layer.
        counts: this stage counts its ties in the norm; the last stage leaves that to the first.
    """

    def __init__(
        self,
        inner: HalfEngine,
        ties: Sequence[nn.Parameter],
        ends: dist.ProcessGroup | None,
        column: dist.ProcessGroup,
        *,
        counts: bool,
    ) -> None:
        self.inner = inner
        self.parameters = inner.parameters
        self.in_lockstep = inner.in_lockstep
        self._ties = ties
        self._ends = ends
        self._column = column
        self._counts = counts

    @property
    def record(self) -> StepRecord:
        """See `HalfEngine`."""
        return self.inner.record

    @property
    def trains(self) -> bool:
        """Whether any parameter of the stage wants a gradient."""
        return self.inner.trains

    def begin_step(self) -> None:
        """See `HalfEngine`."""
        self.inner.begin_step()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `HalfEngine`."""
        return self.inner.call(function, *args)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """See `HalfEngine`."""
        return self.inner.backward(last=last)

    def send_gradients(self) -> None:
        """See `HalfEngine`."""
        self.inner.send_gradients()

    def finish_gradients(self, scale: float) -> None:
        """As the layout does; then the first and the last stage add the gradients of what both hold."""
        self.inner.finish_gradients(scale)
        for parameter in self._ties:
            if not parameter.requires_grad:
                continue
            value = local_part(parameter.data)
            flat = value.new_zeros(value.numel() + 1)
            if parameter.grad is not None:
                flat[:-1].copy_(local_part(parameter.grad).reshape(-1))
                flat[-1] = 1
            dist.all_reduce(flat, group=self._ends)
            if parameter.grad is None and float(flat[-1]) > 0:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                local_part(parameter.grad).copy_(flat[:-1].view_as(value))

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients over all ranks of all stages, what two hold counted once."""
        tied = () if self._counts else {id(parameter.grad) for parameter in self._ties}
        square = self.inner.squared_norm([gradient for gradient in gradients if id(gradient) not in tied])
        device = self.parameters[0].device if self.parameters else square.device
        total = square.detach().to(device, torch.float64)
        dist.all_reduce(total, group=self._column)
        return total
