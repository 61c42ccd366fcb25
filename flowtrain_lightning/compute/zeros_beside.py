"""Zeros that go back only because other ranks run a backward, too: what nothing else reaches has no gradient.

In one process no backward goes through an output that the loss does not read, and weights behind it alone keep
``grad = None``, on which weight decay does not act. Ranks that meet in backwards must all run them, so zeros go back
there; the weights that only zeros have reached are found in autograd's graph, and have none again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from flowtrain_lightning.parallel import HalfEngine
from flowtrain_lightning.parallel.deepspeed.deepspeed_half import DeepSpeedHalf
from flowtrain_lightning.parallel.engine import StepRecord


class ZerosBeside:
    """Keeps in mind, for a step, where this rank sends nothing but zeros back.

    Args:
        trading: roles whose backwards bring gradients of other ranks' losses to weights (experts, context ranks). What
            this rank's zeros reach may have a gradient there; only a role through which no rank sends one has none.
    """

    def __init__(self, trading: Collection[str] = ()) -> None:
        self._trading = frozenset(trading)
        self._used: set[str] = set()

    def begin_step(self) -> None:
        """No gradient has gone back yet."""
        self._used.clear()

    def going_back(
        self, role: str, engine: HalfEngine, zeroed: Sequence[Tensor], others: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Inside, one backward of a role runs; see `leaving_none`. Weights that nobody uses are zero to DeepSpeed."""
        if role in self._trading or isinstance(engine, DeepSpeedHalf):
            self._used |= {role} if others else set()
            return nullcontext()
        return leaving_none(zeroed, others)

    def recorded(self, role: str, engine: HalfEngine) -> StepRecord:
        """The engine's record of the step, with all weights unused where a trading role has sent zeros alone."""
        record = engine.record
        if role in self._trading and role not in self._used:
            return replace(record, unused=range(len(engine.parameters)))
        return record


@contextmanager
def leaving_none(zeroed: Sequence[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Inside, one backward runs; leaves that only ``zeroed`` reach, and that had no gradient, have none after it.

    Args:
        zeroed: outputs through which zeros go back.
        others: outputs through which gradients go back in the same backward.
    """
    seen: set[Any] = set()  # the nodes themselves: autograd may give the number of one that has gone to another
    if zeroed:
        for _ in leaves_behind(others, seen):
            pass
    handles = [
        leaf.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        for leaf in leaves_behind(zeroed, seen)
        if leaf.grad is None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop(leaf: Tensor) -> None:
    """As soon as it is made: what sums gradients during the backward must not take it for one."""
    leaf.grad = None


def leaves_behind(outputs: Iterable[Tensor], seen: set[Any]) -> Iterator[Tensor]:
    """The leaves that a backward of these outputs reaches, without those behind nodes that were seen.

    Args:
        outputs: with their graph.
        seen: nodes of the graph; those that are met come to them.
    """
    left: list[Any] = []
    for output in outputs:
        if output.grad_fn is None:
            yield output
        elif output.grad_fn not in seen:
            seen.add(output.grad_fn)
            left.append(output.grad_fn)
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
