"""Bounds how far apart two runs of the same computation may be, by the rounding of this module, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowtrain_lightning.packing_check.detached_copy import detached_copy
from flowtrain_lightning.packing_check.dispatch_modes import SeenPrecisions
from flowtrain_lightning.packing_check.machine import CPU
from flowtrain_lightning.packing_check.passes import Pass, Passes, relative_errors

EXACT = 1e-9
"""Relative error of a tensor up to which two runs in float64 are equal."""

_UNITS = 30.0
"""So many times the effect of one rounding of all weights may add up in a pass."""
_FEWEST_UNITS = 8.0


@dataclass(frozen=True)
class Bounds:
    """Relative errors that rounding explains.

    Attributes:
        of_tensors: name of a value or of a weight's gradient -> its bound.
        of_loss: of the loss, relative to the sum of its parts without their signs.
        least: of whatever is not named.
    """

    of_tensors: Mapping[str, float]
    of_loss: float
    least: float

    def of(self, name: str) -> float:
        """The bound of one tensor."""
        return max(self.least, self.of_tensors.get(name, 0.0))


def rounding_bounds(passes: Passes, run: Callable[[Passes], Pass]) -> Bounds:
    """Bounds made from the module's own rounding.

    Some modules compute parts in float32 whatever their weights are, as norms and softmax of Hugging Face's do. Each
    weight is changed by one unit of the least precision that occurs in a pass; the change of loss and gradients is what
    one rounding does to them. Both passes begin from the same state, on copies.

    Args:
        passes: of the module that is checked.
        run: one pass, sample by sample.
    """
    with SeenPrecisions() as precisions:
        run(passes)
    unit = max((torch.finfo(dtype).eps for dtype in precisions.seen), default=torch.finfo(torch.float64).eps)
    least = max(EXACT, _FEWEST_UNITS * unit)
    _forget_graphs(passes.module)
    try:
        expected = run(passes.on(_copy(passes.module)))
        changed = run(passes.on(_with_rounded_weights(_copy(passes.module), unit)))
    except Exception:  # what the module holds cannot be shared by copies
        return Bounds({}, least, least)
    errors = relative_errors(expected.values, changed.values)
    errors |= relative_errors(expected.gradients, changed.gradients)
    of_loss = abs(changed.loss - expected.loss) / loss_scale(expected)
    return Bounds({name: _UNITS * error for name, error in errors.items()}, max(least, _UNITS * of_loss), least)


def _copy(module: Any) -> Any:
    copied = detached_copy(module)
    copied.trainer = module.trainer
    return copied


def _with_rounded_weights(module: nn.Module, unit: float) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            sign = torch.rand(weight.shape, generator=draw, dtype=torch.float32, device=CPU).sub_(0.5).sign_()
            weight.mul_(1 + unit * sign.to(weight))
    return module


def _forget_graphs(module: nn.Module) -> None:
    """Cuts tensors that layers keep from their last call off from its graph, with which they cannot be copied."""
    for layer in module.modules():
        for name, value in list(vars(layer).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(layer, name, value.detach())


def loss_scale(found: Pass) -> float:
    """Returns the scale of a loss: a sum that is near 0 is made of parts that are not."""
    return max(found.magnitude, abs(found.count), 1e-300)
