"""Weights that are needed elsewhere than where they stand: stages there would lack them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing_check.passes import FeaturesOfItems, Passes
from flowtrain_lightning.parallel.stages.stage_cut import cut_half


class NeededWeight(NamedTuple):
    """A weight that is needed by a block, or by what runs between this block and the next one.

    Attributes:
        block: its number; 0 also of what runs before it, and -1 of the last one and of what runs behind it. The last
            one stands for all of its kind, where a copy has fewer.
        weight: its name.
    """

    block: int
    weight: str


def unlikely_needs(passes: Passes, features: FeaturesOfItems) -> list[NeededWeight]:
    """Finds needs that do not follow from where a weight stands: before the blocks, behind them, or both if it is tied.

    It is found by numbers that are none (NaN) in place of weights. Each block is given what it is given in a forward
    with all weights, so what is none behind it, it has made of these. A block's own weights are needed elsewhere where
    it leaves something beside its hidden states, such as a term of the loss as an attribute.

    Args:
        passes: of a copy that nobody needs any more.
        features: of the media items.

    Raises:
        ValueError: there are no blocks that stages could share.
    """
    module = passes.module
    first, last = (cut_half(module, module.role_graph.trunk, stage, StageSchedule(2)) for stage in range(2))
    inside = tuple(f"{path}." for path in first.blocks)
    known = {name for name, _ in module.named_parameters() if not name.startswith(inside)}
    end = len(first.blocks) - 1
    standing = [
        (sorted(known & last.absent), {0}),
        (sorted(known & first.absent), {end}),
        (sorted(known.intersection(first.ties)), {0, end}),
    ]
    blocks = [module.get_submodule(path) for path in first.blocks]
    forward = partial(passes.loss_alone, 0, features, passes.microbatch([0], together=False))
    with _watched(blocks, watch := _Watch()):
        if not math.isfinite(forward()) or watch.order != [*range(len(blocks))]:
            return []  # which training meets
        watch.looks = True
        found: list[NeededWeight] = []
        for names, likely in standing:
            if names and not watch.needing(module, names, forward) <= likely:
                each = {name: watch.needing(module, [name], forward) - likely for name in names}
                found += [NeededWeight(-1 if b == end else b, name) for name in names for b in sorted(each[name])]
        for number, path in enumerate(first.blocks):
            names = [name for name, _ in module.named_parameters() if name.startswith(f"{path}.")]
            beside = watch.needing(module, names, forward) - {number} if names else ()
            found += [NeededWeight(-1 if b == end else b, names[0]) for b in sorted(beside)]
    return found


class _Watch:
    """The hidden states in front of every block and behind it, in a forward with all weights and in later ones.

    Attributes:
        looks: later forwards run.
        order: the numbers of the blocks that have run.
    """

    def __init__(self) -> None:
        self.looks = False
        self.order: list[int] = []
        self._given: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self._needing: set[int] = set()

    def needing(self, module: nn.Module, names: Iterable[str], forward: Callable[[], float]) -> set[int]:
        """The blocks at which a forward without these weights has numbers that are none."""
        named = dict(module.named_parameters())
        none = {f"module.{name}": _none_like(named[name]) for name in names}
        self._needing = set()
        if not math.isfinite(functional_call(_Inside(module), none, (forward,))):
            self._needing.add(len(self._made) - 1)
        return self._needing

    def before(self, number: int, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """In front of a block: what the block before it and what runs between them give."""
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.order.append(number)
        if not self.looks:
            self._given[number] = hidden.clone()
            return None
        self._compare(hidden, self._given[number], max(number - 1, 0))
        true = self._given[number].clone()
        return tuple(true if value is hidden else value for value in args), {
            name: true if value is hidden else value for name, value in kwargs.items()
        }

    def behind(self, number: int, block: nn.Module, args: Any, made: Any) -> Any:
        """Behind a block: what it makes of true hidden states."""
        hidden = made[0] if isinstance(made, tuple) else made
        if not self.looks:
            self._made[number] = hidden.clone()
            return None
        self._compare(hidden, self._made[number], number)
        true = self._made[number].clone()
        return (true, *made[1:]) if isinstance(made, tuple) else true

    def _compare(self, found: Tensor, true: Tensor, number: int) -> None:
        if bool((found.isnan() & ~true.isnan()).any()):
            self._needing.add(number)


@contextmanager
def _watched(blocks: list[nn.Module], watch: _Watch) -> Iterator[None]:
    handles = []
    for number, block in enumerate(blocks):
        before, behind = partial(watch.before, number), partial(watch.behind, number)
        handles += [
            block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            block.register_forward_hook(behind),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Inside(nn.Module):
    """Runs a function while weights of a module are replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], float]) -> float:
        """``function()``."""
        return function()


def _none_like(weight: Tensor) -> Tensor:
    """Numbers that are none, in the form of a weight and without memory."""
    return torch.full((), math.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)
