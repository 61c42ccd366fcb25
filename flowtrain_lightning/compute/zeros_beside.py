"""Zeros that go back only because other ranks run a backward, too: what nothing else reaches has no gradient.

In one process no backward goes through an output that the loss does not read, and weights behind it alone keep
``grad = None``, on which weight decay does not act. Ranks that meet in backwards must all run them, so zeros go back
there; the weights that only zeros have reached are found in autograd's graph, and have none again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def leaving_none(zeroed: Sequence[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Inside, one backward runs; leaves that only ``zeroed`` reach, and that had no gradient, have none after it.

    Args:
        zeroed: outputs through which zeros go back.
        others: outputs through which gradients go back in the same backward.
    """
    seen: set[Any] = set()  # the nodes themselves: autograd may give the number of one that has gone to another
    if zeroed:
        for _ in _leaves(others, seen):
            pass
    handles = [
        leaf.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        for leaf in _leaves(zeroed, seen)
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


def _leaves(outputs: Iterable[Tensor], seen: set[Any]) -> Iterator[Tensor]:
    """The leaves that a backward of these outputs reaches, without those behind nodes that were seen."""
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
