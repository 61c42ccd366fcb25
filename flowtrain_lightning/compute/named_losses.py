"""Reads what a user's ``loss`` returns: one summed loss and its count, or several of them by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flowtrain_lightning.allocator import RoleGraph

LossPair = tuple[Tensor, int | Tensor]
"""A loss summed over its terms, and how many these are."""

LossOutput = LossPair | Mapping[str, LossPair]
"""One loss, or several by name."""


class LossModule(Protocol):
    """A module with losses; `FlowModule` is one."""

    loss_weights: Mapping[str, float]

    @property
    def role_graph(self) -> RoleGraph:
        """The edges between the halves."""


class ReturnedLosses(NamedTuple):
    """The losses of one microbatch.

    Attributes:
        losses: tensors of one element, each summed over its own terms, in the order of their names.
        counts: how many terms each has.
        rest: what was returned behind them.
    """

    losses: tuple[Tensor, ...]
    counts: tuple[int | float | Tensor, ...]
    rest: tuple[Any, ...]

    @property
    def loss(self) -> Tensor:
        """The one loss, or ``[losses]``, to be differentiated."""
        return self.losses[0] if len(self.losses) == 1 else torch.stack([each.reshape(()) for each in self.losses])

    @property
    def summed(self) -> tuple[Tensor, int | float | Tensor]:
        """The sum of all losses and that of their counts."""
        first, *more = (each.reshape(()) for each in self.losses)
        return sum(more, first), sum(self.counts[1:], self.counts[0])


def loss_names(module: LossModule) -> tuple[str, ...]:
    """Names of the losses that ``loss`` returns: the trunk's, and in order those that are weighed and no role's."""
    graph = module.role_graph
    return (graph.trunk, *sorted({*module.loss_weights} - {*graph.roles}))


def returned_losses(output: Any, names: Sequence[str], method: str, *, more: bool = False) -> ReturnedLosses:
    """Reads a method's output.

    Args:
        output: a pair of a summed loss and its count, or name -> such a pair.
        names: of the losses that it should have.
        method: which it was, in words.
        more: something may stand behind them.

    Raises:
        TypeError: it is something else.
    """
    found, rest = _parts(output)
    pairs = {names[0]: found} if isinstance(found, tuple) else found
    is_named = isinstance(pairs, Mapping) and pairs.keys() == {*names} and (more or not rest)
    if is_named and all(map(_is_pair, pairs.values())):
        losses, counts = zip(*(pairs[name] for name in names), strict=True)
        return ReturnedLosses(losses, counts, rest)
    one = "a pair: the loss summed over the target tokens, a tensor of one element, and the number of these tokens"
    several = f"a dictionary of the losses {' and '.join(map(repr, names))}, which `loss_weights` names, and for each "
    wanted = one if len(names) == 1 else f"{several}{one}"
    raise TypeError(f"{method} returned {described(output)}; return {wanted}.")


def with_rows(output: LossOutput, rows: Any) -> tuple[Any, ...]:
    """What a step returns of losses, and rows that others read behind them."""
    return (output, rows) if isinstance(output, Mapping) else (*output, rows)


def _parts(output: Any) -> tuple[Any, tuple[Any, ...]]:
    match output:
        case Mapping():
            return output, ()
        case (Mapping() as found, *rest):
            return found, tuple(rest)
        case (loss, count, *rest):
            return (loss, count), tuple(rest)
    return None, ()


def _is_pair(value: Any) -> bool:
    match value:
        case (Tensor() as loss, int() | float() | Tensor()):
            return loss.numel() == 1
    return False


def described(value: Any) -> str:
    """What a method has returned, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, Mapping) and any(isinstance(each, tuple) for each in value.values()):
        return f"{{{', '.join(f'{name!r}: {described(each)}' for name, each in value.items())}}}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"
