"""What is left of Lightning's backward where ``training_step`` has run that of a whole step when it returns."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer

from flowtrain_lightning.parallel import clip_to_norm, clip_to_value

_NEARLY = 1e-2
"""A loss may come back in another type of numbers, of which bfloat16 has three digits."""


@dataclass
class _StepLeft:
    """Left by the step that has run; apart from the module, whose own attributes are slow to set.

    Attributes:
        loss: its mean loss, of which the gradients are.
        aside: weights and their gradients, until Lightning has asked for a backward.
    """

    loss: Tensor | None = None
    aside: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)


class OwnBackward(L.LightningModule):
    """A LightningModule whose ``training_step`` makes the gradients, and sees to it that Lightning means the same."""

    def __init__(self) -> None:
        super().__init__()
        self._left = _StepLeft()

    def with_gradients_made(self, loss: Tensor) -> Tensor:
        """The loss that a step returns, whose gradients are in the weights."""
        self._left.loss = loss
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Keeps the gradients from the optimizer until `backward`, and zeroes none: the next step does at its start.

        Lightning calls this after ``training_step``, and `backward` only where that did not return None, which skips a
        step on one rank; on several ranks Lightning refuses None.
        """
        if self.trainer.world_size > 1:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._left.aside = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        for weight, _ in self._left.aside:
            weight.grad = None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Makes no gradients: ``training_step`` has run one backward per microbatch already.

        Raises:
            ValueError: they are not those of this loss, which an override of ``training_step`` has returned.
        """
        left = self._left
        for weight, gradient in left.aside:
            weight.grad = gradient
        own, left.loss, left.aside = left.loss, None, []
        self._refuse_other_loss(loss, own)

    @abstractmethod
    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of all halves; ``parameters`` are this rank's."""

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by value, or by one norm over the gradients of both halves on all ranks.

        Raises:
            ValueError: the algorithm is neither ``"norm"`` nor ``"value"``, in letters of any case.
        """
        algorithm = (gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm").lower()
        if algorithm not in ("norm", "value"):
            raise ValueError(
                f"clip_gradients got gradient_clip_algorithm={gradient_clip_algorithm!r}; give 'norm' or 'value'."
            )
        limit = self.trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if limit is None or limit <= 0:
            return  # as Lightning has it
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if algorithm == "value":
            clip_to_value(gradients, limit)
        else:
            clip_to_norm(gradients, limit, self.gradient_norm(parameters))

    def _refuse_other_loss(self, loss: Tensor, own: Tensor | None) -> None:
        step = f"{type(self).__name__}.training_step"
        advice = "Compute all that is to train in `loss` (or `backbone_step`), which may return several losses"
        if own is None:
            raise ValueError(
                f"{step} does not call super().training_step(batch, batch_idx), which runs forward and backward of a "
                f"step, so nothing would be trained. {advice}."
            )
        if loss.requires_grad:
            raise ValueError(
                f"{step} returns a loss with a graph of its own, but the step's backward is over when "
                f"super().training_step returns, so what was added would not be trained. {advice}."
            )
        given, expected = float(loss), float(own)
        alike = math.isclose(given, expected, rel_tol=_NEARLY) or given == expected
        if not alike and not math.isnan(expected):
            raise ValueError(
                f"{step} returns {given:g} where super().training_step returned {expected:g}, of which the gradients "
                f"are. {advice}; and return what super().training_step returns, or None to skip the step."
            )
