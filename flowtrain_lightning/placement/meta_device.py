"""A module on the meta device, where nothing is computed: copies of it, and a mode for parts that read numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flowtrain_lightning.allocator.flops import MODEL_BACKWARD
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing_check import detached_copy

_META = torch.device("meta")
_IN_PLACE = ("__setitem__", "index_copy_", "index_add_", "index_put_", "scatter_", "masked_scatter_", "copy_")


def copy_on_meta(module: FlowModule) -> FlowModule:
    """A built copy whose weights take no memory, with the Trainer of the module, if it has one.

    Buffers of a module that is built are copied as they are, since models read them. A half that other ranks hold is
    there without memory, which is all that a copy on the meta device has of any half.
    """
    # Of a weight of which ranks hold shards the whole one: that is what its shape says.
    weights = {
        id(weight): nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad)
        for weight in module.parameters()
    }
    copied = detached_copy(module, weights)
    with torch.device("meta"):
        copied.configure_model()  # before it has a Trainer, whose ranks would all have to check what packing changes
    with suppress(RuntimeError):
        copied.trainer = module.trainer
    return copied


class MetaTensorMode(TorchFunctionMode):
    """Inside, numbers that steer the computing are real and lie on the CPU; all else lies on the meta device.

    Grids, boundaries of sequences and masks decide what is computed, so models read them: with ``tolist``, or by
    indexing with a mask. Such tensors of whole numbers and booleans stay on the CPU, also where a model moves them
    to the device of others, and follow to the meta device once an operation takes them together with what is there.

    Attention is not run at all, since what it would be run by on the meta device computes pairs that its mask leaves
    out. Its FLOPs are counted here.

    Attributes:
        attention_flops: of attention: pairs of a query and a key that its mask leaves, forward and backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_flops = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one of torch's functions, on the CPU or on the meta device."""
        given = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            return self._attention(*args, **given)
        found = list(_tensors((args, given)))
        if any(one.is_meta for one in found):
            return self._with_meta(func, args, given, found)
        result = func(*args, **given)
        if isinstance(result, Tensor) and result.is_meta and _steers(result):
            return _on_cpu(func, args, given, result)
        return result

    def _with_meta(
        self, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any], found: list[Tensor]
    ) -> Any:
        if all(one.is_meta for one in found):
            return func(*args, **given)
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE and not args[0].is_meta:
            raise RuntimeError(f"{name} writes what is computed into a tensor on the CPU; create that tensor elsewhere")
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _picked(args[1]), *args[2:])
        return func(*_moved(args), **_moved(given))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        heads = math.prod(query.shape[:-2])
        pairs = _pairs(query.shape[-2], key.shape[-2], heads, attn_mask, is_causal)
        flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
        output: Tensor = _Attention.apply(self, flops, *_moved((query, key, value)))  # type: ignore[no-untyped-call]
        return output


class _Attention(torch.autograd.Function):
    """Stands for attention: gives tensors of the right shape, and counts FLOPs."""

    @staticmethod
    def forward(ctx: Any, mode: MetaTensorMode, flops: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.mode, ctx.flops = mode, flops
        ctx.save_for_backward(query, key, value)
        mode.attention_flops += flops
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        ctx.mode.attention_flops += MODEL_BACKWARD * ctx.flops
        return (None, None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors))


def _pairs(queries: int, keys: int, heads: int, mask: Tensor | None, causal: bool) -> float:
    """Pairs of a query and a key that attention computes, over all heads."""
    if causal:
        reach = min(queries, keys)
        return heads * (reach * (reach + 1) / 2 + (queries - reach) * keys)
    if mask is None or mask.is_meta:
        return float(heads * queries * keys)
    left = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return float(left.sum()) * (heads * queries * keys / left.numel())


def _steers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _on_cpu(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any], result: Tensor) -> Any:
    """Whole numbers or booleans that were to be made on meta, or moved there, where they can be read."""
    if args and isinstance(args[0], Tensor):
        return args[0].to(result.dtype)
    return func(*args, **{**given, "device": torch.device("cpu")})


def _picked(index: Any) -> Any:
    """An index with the positions that a mask picks instead of the mask: how many they are, the CPU can tell."""
    parts = index if isinstance(index, tuple) else (index,)
    positions: list[Any] = []
    for part in parts:
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and not part.is_meta
        positions += part.nonzero(as_tuple=True) if is_mask else [part]
    return tuple(positions)


def _moved(values: Any) -> Any:
    """Values with all their tensors on the meta device."""
    if isinstance(values, Tensor):
        return values if values.is_meta else values.to(_META)
    if isinstance(values, tuple | list):
        return type(values)(_moved(value) for value in values)
    if isinstance(values, dict):
        return {name: _moved(value) for name, value in values.items()}
    return values


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
