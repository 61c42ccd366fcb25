"""Counts how many tokens chose each expert, in the batches of steps that train, each token once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

COUNTS = "expert_counts"
"""Attribute of a module that is the experts of a layer."""

_counting = False


@contextmanager
def counting_choices(is_counted: bool) -> Iterator[None]:
    """Inside, forwards with gradients are counted, if a batch is.

    Padding is not, and what runs elsewhere neither: what a backward computes again, checks, trials.
    """
    global _counting
    former, _counting = _counting, is_counted
    try:
        yield
    finally:
        _counting = former


class ExpertCounts:
    """The tokens that chose each expert of a layer, on this rank.

    Attributes:
        chosen: ``[experts]`` int64, since the run began; None before the first batch.
    """

    def __init__(self) -> None:
        self.chosen: Tensor | None = None
        self._told: Tensor | None = None
        self._of_steps: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, ends: Tensor) -> None:
        """Counts a batch, if it is to be.

        Args:
            ends: ``[experts]`` int32, where the rows of each expert end, sorted by expert.
        """
        if _counting and torch.is_grad_enabled():
            counts = ends.diff(prepend=ends.new_zeros(1)).long()
            self.chosen = counts if self.chosen is None else self.chosen + counts

    def take_told(self) -> list[int]:
        """Those since the last call; ``[]`` where there was no batch."""
        found, self._told = _since(self.chosen, self._told), self.chosen
        return [] if found is None else found.tolist()

    def take_step(self) -> Tensor | None:
        """``[experts]`` those of the step that ends; None where there was no batch in the run."""
        found, self._of_steps = _since(self.chosen, self._of_steps), self.chosen
        return found


def _since(now: Tensor | None, then: Tensor | None) -> Tensor | None:
    return now if now is None or then is None else now - then


class ExpertBalance(nn.Module):
    """A bias for each expert, which follows how full it was: balancing without a loss (arXiv 2408.15664).

    Its state is how much more often a bias was raised than lowered: whole numbers, the same in any layout and dtype.

    Args:
        count: experts.
        rate: by which a bias changes at the end of a step.
    """

    raised: Tensor

    def __init__(self, count: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("raised", torch.zeros(count, dtype=torch.int64))

    def forward(self, scores: Tensor) -> Tensor:
        """Scores as experts are chosen by, at least in float32; without gradients."""
        return scores.detach().to(torch.promote_types(scores.dtype, torch.float32)) + self.rate * self.raised

    def follow(self, chosen: Tensor) -> None:
        """At the end of a step: raises the bias of experts that fewer tokens chose than the mean, and lowers others.

        Args:
            chosen: ``[experts]`` int64, how many tokens of the whole step chose each.
        """
        self.raised += torch.sign(chosen.sum() - len(chosen) * chosen)


def is_balanced(module: nn.Module) -> bool:
    """Whether a module is experts that have such biases."""
    return isinstance(getattr(module, "balance", None), ExpertBalance)


def balance_experts(modules: Iterable[nn.Module], sum_over_ranks: Callable[[Tensor], object]) -> None:
    """Lets all biases of a half follow the step that ends. All ranks that have the half call it.

    Those of experts that do not train stay.

    Args:
        modules: all of the half, in its order.
        sum_over_ranks: sums a tensor over these ranks, in place.
    """
    balanced: list[tuple[ExpertBalance, ExpertCounts]] = [
        (module.balance, getattr(module, COUNTS))  # type: ignore[misc]
        for module in modules
        if is_balanced(module) and any(weight.requires_grad for weight in module.parameters())
    ]
    if not balanced:
        return
    taken = [(balance, counts.take_step()) for balance, counts in balanced]
    of_layers = [torch.zeros_like(balance.raised) if chosen is None else chosen for balance, chosen in taken]
    flat = torch.cat(of_layers)
    sum_over_ranks(flat)
    for (balance, _), chosen in zip(balanced, torch.split(flat, [len(each) for each in of_layers]), strict=True):
        balance.follow(chosen)
