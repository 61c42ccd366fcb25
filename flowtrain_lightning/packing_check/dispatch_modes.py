"""Modes that see every operation of torch: draws that all give one number, one precision, and those that occur.

`TorchDispatchMode` is what torch's own counters of FLOPs and memory are made of, though its module has a private name:
functions that C++ composes of others, such as dropout within attention, are seen by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_CONSTANTS = {"randn": 0.0, "normal": 0.0, "exponential": 1.0, "rand": 0.5, "uniform": 0.5, "bernoulli": 1.0}
"""Beginning of an operation's name -> the number that it gives."""
_LOWER = (torch.float32, torch.bfloat16, torch.float16)


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, each number that torch draws is the same, so that runs can be compared that draw in another order.

    Draws from a generator of the caller's own stay as they are. Integers are drawn as ever.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        if torch.Tag.nondeterministic_seeded not in func.tags or given.get("generator") is not None:
            return result
        name = func.overloadpacket.__name__
        if name.startswith("native_dropout"):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        constant = next((number for kind, number in _CONSTANTS.items() if name.startswith(kind)), None)
        if constant is not None and isinstance(result, Tensor) and not name.startswith(("randint", "randperm")):
            result.fill_(constant)
        return result


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what asks for float32 or less is given float64, and so is what meets float64 on its way.

    Norms, softmax and logits in float32, and autocast that a module sets itself, would else round away small mixtures.
    Tables that stay in float32 when their module is moved, as rotary frequencies do in transformers 5.17, could not be
    multiplied with the rest.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        given = dict(kwargs or {})
        if given.get("dtype") in _LOWER:
            given["dtype"] = torch.float64
        if not func._schema.is_mutable:
            args = _in_one_precision(args)
        return func(*args, **given)


def _in_one_precision(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of which some are tensors in float64, with the others of floating point in it too."""
    flat, tree = tree_flatten(args)
    seen = {leaf.dtype for leaf in flat if isinstance(leaf, Tensor)}
    if torch.float64 not in seen or seen.isdisjoint(_LOWER):
        return args
    raised = [leaf.double() if isinstance(leaf, Tensor) and leaf.dtype in _LOWER else leaf for leaf in flat]
    arguments: tuple[Any, ...] = tree_unflatten(raised, tree)
    return arguments


class SeenPrecisions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the floating-point types of all results are noted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        result = func(*args, **dict(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.seen.add(one.dtype)
        return result
