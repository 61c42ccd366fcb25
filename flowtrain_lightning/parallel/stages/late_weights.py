"""Gradients of weights that a backward leaves for later, so that the stage before has its gradients sooner.

It is linear layers that do so: they have nearly all weights, and of each half of the backward's work is for them. Other
weights (norms, biases, embeddings, experts, and heads, of which gradients of logits would be kept) have their gradients
with the rest of the backward, which is as exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from flowtrain_lightning.allocator.late_bytes import is_made_later


class LateWeight(NamedTuple):
    """A weight's gradient that has not been made.

    Attributes:
        weight: ``[outputs, inputs]``.
        inputs: ``[rows, inputs]`` of the forward.
        gradients: ``[rows, outputs]`` of the loss with regard to the layer's outputs.
    """

    weight: nn.Parameter
    inputs: Tensor
    gradients: Tensor


class LateWeights:
    """The linear layers of one stage, which leave the gradients of their weights for later.

    Attributes:
        left: by the backward that runs; None: none does.
    """

    def __init__(self) -> None:
        self.left: list[LateWeight] | None = None
        self._in_forward = False

    def attach(self, module: nn.Module) -> None:
        """Takes over the linear layers that are in a module, and no others that compute in their own way."""
        for part in module.modules():
            if not isinstance(part, nn.Linear) or not is_made_later(part.in_features, part.out_features):
                continue
            if type(part).forward is nn.Linear.forward and "forward" not in vars(part):
                part.forward = partial(self._linear, part)  # type: ignore[method-assign]

    @contextmanager
    def for_later(self) -> Iterator[None]:
        """Inside, a forward runs whose backward will run in `left_in`."""
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    @contextmanager
    def left_in(self, left: list[LateWeight]) -> Iterator[None]:
        """Inside, a backward runs that leaves the gradients of weights, to be made by `finish`."""
        self.left = left
        try:
            yield
        finally:
            self.left = None

    @staticmethod
    def finish(left: list[LateWeight]) -> None:
        """Makes the gradients that a backward has left, as if that had: with all hooks of the weights."""
        ones = [_Late.apply(*each) for each in left]  # type: ignore[no-untyped-call]
        left.clear()  # what is kept for each goes as soon as it is made
        if ones:
            torch.autograd.backward(ones, [torch.ones_like(one) for one in ones])

    def _linear(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        runs = self._in_forward or self.left is not None  # a backward computes layers again as they were computed
        leaves = runs and inputs.requires_grad and weight.requires_grad and torch.is_grad_enabled()
        if not leaves or not isinstance(weight, nn.Parameter):
            return functional.linear(inputs, weight, bias)
        # Autocast stops at a function of one's own, and would not know of the gradients of what it casts inside.
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind) and inputs.dtype != torch.float64:
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        found: Tensor = _Linear.apply(self, (weight,), inputs, bias)  # type: ignore[no-untyped-call]
        return found


class _Linear(torch.autograd.Function):
    """A linear layer whose weight's gradient is left for later."""

    @staticmethod
    def forward(
        ctx: Any, late: LateWeights, held: tuple[nn.Parameter], inputs: Tensor, bias: nn.Parameter | None
    ) -> Tensor:
        # The weight comes in a tuple, or its hooks would be told of a gradient that is not there yet. It is no saved
        # tensor, since of layers that are computed again these are copies.
        (ctx.weight,) = held
        ctx.late, ctx.bias_type = late, None if bias is None else bias.dtype
        ctx.save_for_backward(inputs)
        kind = inputs.dtype
        with torch.autocast(inputs.device.type, enabled=False):
            return functional.linear(inputs, ctx.weight.to(kind), None if bias is None else bias.to(kind))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        (inputs,), rows = ctx.saved_tensors, gradient.reshape(-1, gradient.shape[-1])
        assert ctx.late.left is not None, "the backward of such a forward runs in left_in"
        ctx.late.left.append(LateWeight(ctx.weight, inputs.reshape(-1, inputs.shape[-1]), rows))
        of_bias = rows.sum(0).to(ctx.bias_type) if ctx.needs_input_grad[3] else None
        return None, None, gradient @ ctx.weight.to(gradient.dtype), of_bias


class _Late(torch.autograd.Function):
    """Zero, whose gradient with regard to a weight is the one that was left for later."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, inputs: Tensor, gradients: Tensor) -> Tensor:
        ctx.save_for_backward(weight, inputs, gradients)
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        weight, inputs, gradients = ctx.saved_tensors
        return (gradients.t() @ inputs).to(weight.dtype), None, None
