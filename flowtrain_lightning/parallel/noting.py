"""The mode in which a module is built without its weights: what concerns them runs on the meta device, and is noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch's way to see every operation, under no public name
from torch.utils._pytree import tree_flatten, tree_unflatten

from flowtrain_lightning.parallel.ranks.building_log import (
    BLANK,
    META,
    BuildingLog,
    NotNotableError,
    arguments_of,
    draws,
    tensors_in,
    trunc_normal,
    written_arguments,
)

LARGE_BYTES = 1 << 20
"""Tensors computed from existing ones are computed at once, unless they are as large as this."""


@contextmanager
def noting(log: BuildingLog) -> Iterator[None]:
    """Inside, weights get no memory, and a log is kept of what makes them."""
    # Private, since libraries keep the public function as it was when they were imported.
    built_in = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = _noted_trunc_normal
    try:
        with _NotMetaMode(log), _NotingMode(log):
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = built_in


class _NotingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what concerns weights on the meta device, and notes it."""

    def __init__(self, log: BuildingLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        concerned = any(self._log.noted(tensor) for tensor in tensors)
        if not concerned and not self._may_concern(func, tensors, kwargs):
            return func(*args, **kwargs)
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise NotNotableError(f"{func} draws from a generator of its own")
        device = self._device(tensors, kwargs)
        if "device" in kwargs or (not tensors and "device" in arguments_of(func)):
            kwargs["device"] = device
        result, new = _on_meta(func, args, kwargs)
        results = tensors_in(result)
        if not concerned and not self._is_weight(func, new):
            return func(*args, **kwargs)
        if any(not self._log.noted(tensor) for tensor in written_arguments(func, args, kwargs)):
            raise NotNotableError(f"{func} writes what is drawn into a tensor that is there")
        if not tensors and "dtype" in arguments_of(func):
            kwargs["dtype"] = results[0].dtype  # the default may be another one later
        given, tree = tree_flatten((args, kwargs))
        noted = [(self._log.noted(leaf) or leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        self._log.add(func, noted, tree, results, device)
        return result

    def _may_concern(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether what is made of tensors that are there may be a weight, as far as the arguments tell."""
        device = kwargs.get("device")
        if any(tensor.device == META for tensor in tensors) and device is None:
            return False
        if device is not None and device.type == "meta" and (tensors or torch.get_default_device().type == "meta"):
            return False  # whoever builds it wants no memory either
        is_large = sum(tensor.nbytes for tensor in tensors) >= LARGE_BYTES
        return is_large or func.overloadpacket in BLANK or draws(func)

    def _device(self, tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
        """Of what an operation makes, had its arguments memory."""
        device = kwargs.get("device")
        if device is not None:
            return self._log.device if device.type == "meta" else device  # the device of a weight, perhaps
        for tensor in tensors:
            noted = self._log.noted(tensor)
            return self._log.device_of(noted) if noted else tensor.device
        return torch.device("cpu")

    @staticmethod
    def _is_weight(func: Any, new: list[Tensor]) -> bool:
        if draws(func):
            return True
        if func.overloadpacket in BLANK and any(one.is_floating_point() or one.is_complex() for one in new):
            return True
        return sum(one.nbytes for one in new) >= LARGE_BYTES


class _NotMetaMode(TorchFunctionMode):
    """Weights that are noted do not say that they are on the meta device: some of torch's functions leave those out."""

    def __init__(self, log: BuildingLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__ and self._log.noted(args[0]):  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


def _noted_trunc_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    if generator is not None:
        raise NotNotableError("trunc_normal_ draws from a generator of its own")
    with torch.no_grad():
        trunc_normal(tensor, mean, std, a, b)
    return tensor


def _on_meta(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Returns an operation's results for arguments without memory, and those that lie in none of the arguments."""
    leaves, tree = tree_flatten((args, kwargs))
    leaves = [_without_memory(leaf) for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, tree)
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    result = func(*args, **kwargs)
    given = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]  # held: others would get their ids
    new = [one for one in tensors_in(result) if all(one.untyped_storage() is not storage for storage in given)]
    return result, new


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return META
    if isinstance(leaf, Tensor) and leaf.device != META:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    return leaf
