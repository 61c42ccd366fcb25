"""Keeps which experts tokens chose in a forward, for a backward that computes it again.

A router that is computed again could choose otherwise where scores are near each other: rounding differs. Gradients
would then be those of other experts, in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch's way to see every operation, under no public name
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
CHOICES = frozenset({_aten.topk.default, _aten.sort.default, _aten.argmax.default, _aten.multinomial.default})
"""What a router chooses experts by."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of a forward, and of what computes it again; see `torch.utils.checkpoint.checkpoint`."""


def keeping_choices(others: Callable[[], Contexts] | None = None) -> Contexts:
    """The contexts of a layer that keeps its choices.

    Args:
        others: makes further ones, which keep more.
    """
    kept: list[Any] = []
    modes = _Keeps(kept), _Gives(kept)
    if others is None:
        return modes
    # The inner ones look first, so that the others do not see what is given.
    return tuple(map(_both, others(), modes))  # type: ignore[return-value]


class _Keeps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what was chosen. Copies, since routers divide by sums in place."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in CHOICES:
            self._kept.append(_copied(made))
        return made


class _Gives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives what was chosen, in the same order."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._given = 0

    def __enter__(self) -> _Gives:
        self._given = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in CHOICES:
            return func(*args, **(kwargs or {}))
        self._given += 1
        return _copied(self._kept[self._given - 1])


def _copied(made: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, made)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
