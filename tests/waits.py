"""A device from which nothing can be read: whoever would wait for a GPU fails on it.

On the meta device a tensor has no values. So ``item``, ``tolist``, ``nonzero``, masks as indices, the truth of a
tensor, ``repeat_interleave`` without a size, and copies to the host raise there, in a forward as in a backward. What
else waits for a GPU, as a copy that does not go on by itself, raises in `NeverWaiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)


class Waits(AssertionError):
    """The host would wait for the device."""


class NeverWaiting(TorchFunctionMode):
    """Inside, numbers reach the device by copies that the host does not wait for, and no mask decides on a size."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        result = func(*args, **given)
        if func in _MAKERS and result.is_meta:
            raise Waits(f"torch.{name} makes a tensor on the device of numbers on the host")
        if name in ("to", "cuda", "copy_") and _crosses(args, result) and not _goes_on(name, args, given):
            raise Waits(f"{name} copies to the device, and waits for that: non_blocking=True is missing")
        if name in ("__getitem__", "__setitem__") and args[0].is_meta and _has_mask(args[1]):
            raise Waits(f"{name} with a mask: how many elements it picks is known on the device only")
        return result


class ReadingOnce(NeverWaiting):
    """As `NeverWaiting`, but a tensor may be read by ``tolist`` or ``item``, all of whose numbers are 1 then.

    Attributes:
        reads: how often one was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.item) and args[0].is_meta:
            self.reads += 1
            return [1.0] * args[0].numel() if args[0].dim() else 1.0
        return super().__torch_function__(func, types, args, kwargs)


def _crosses(args: tuple[Any, ...], result: Any) -> bool:
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) and result is args[0] else args[0]
    return isinstance(result, Tensor) and result.is_meta and not source.is_meta and source.numel() > 0


def _goes_on(name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    return bool(given.get("non_blocking")) or (name == "to" and True in args[1:])


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
