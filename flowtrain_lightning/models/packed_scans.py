"""Layers that hand something on from token to token beside attention, as scans and short convolutions do."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_KEEPS = ("update_conv_state", "update_recurrent_state", "update_ssm_state")
"""Methods of a cache of ``transformers`` by which a layer keeps what it hands on."""

_KERNELS: Mapping[str, str] = {
    "causal_conv1d_fn": "causal_conv1d",
    "torch_chunk_gated_delta_rule": "fla",
}
"""Functions of layers that a package replaces by a kernel which is told where sequences begin."""


def pack_scans(model: nn.Module) -> None:
    """Lets each packed sequence begin anew in layers such as gated delta nets, Mamba's and short convolutions.

    On a GPU that has the kernels of flash-linear-attention and causal-conv1d these are told where sequences begin.
    Anywhere else a layer computes one sequence after another, by the code that ``transformers`` has for it.

    Args:
        model: of ``transformers``, in evaluation or training; its forward is given `sequence_bounds`.
    """
    for module in model.modules():
        kind: Any = type(module)
        if is_scan(module) and not isinstance(module, _PackedScan):
            module.__class__ = _packed(kind)


def is_scan(module: nn.Module) -> bool:
    """Whether a module hands something on from token to token, other than by attention."""
    kind: Any = type(module)
    return any(isinstance(child, nn.Conv1d) for child in module.children()) or bool(_names(kind) & {*_KEEPS})


def refuse_sharing(model: nn.Module, degree: str) -> None:
    """Refuses ranks that share a model whose layers hand something on from token to token.

    Args:
        model: a decoder.
        degree: of the layout, ``"tensor"`` or ``"context"``.

    Raises:
        NotImplementedError: `pack_scans` has found such layers.
    """
    if any(isinstance(module, _PackedScan) for module in model.modules()):
        raise NotImplementedError(
            f"{type(model).__name__} has scans or convolutions over tokens, which {degree} ranks cannot share. Give "
            f"the backbone a layout without a {degree} degree; shard='fsdp' divides its weights."
        )


class _PackedScan(nn.Module):
    """The class that `pack_scans` makes of a layer's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bounds = kwargs.get("cu_seq_lens_q")
        if bounds is None:  # the model is used as transformers uses it
            return super().forward(*args, **kwargs)
        tokens = _first(args, kwargs).shape[1]
        if _has_kernels(type(self), _first(args, kwargs)):
            number = torch.repeat_interleave(bounds.diff(), output_size=tokens).to(torch.int32)
            return super().forward(*args, **{**kwargs, "seq_idx": number[None]})
        told = {name: value for name, value in kwargs.items() if not name.startswith(("cu_seq_lens", "max_length"))}
        ends = bounds.tolist()
        parts = []
        for begin, end in pairwise(ends):
            own = slice(begin, end)
            given = {name: _cut(value, own, tokens) for name, value in told.items()}
            parts.append(super().forward(*(_cut(value, own, tokens) for value in args), **given))
        return _joined(parts)


@cache
def _packed(kind: Any) -> type[nn.Module]:
    """The class of a layer whose sequences are kept apart; it has the name that its users know."""
    return type(kind.__name__, (_PackedScan, kind), {"__module__": kind.__module__})


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """``[1, tokens, width]`` hidden states, by position or by name."""
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _cut(value: Any, own: slice, tokens: int) -> Any:
    """The part of an argument that is of one sequence: of what has a row for every token of the microbatch."""
    if isinstance(value, tuple):
        return tuple(_cut(each, own, tokens) for each in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == tokens:
        return value[:, own]
    return value


def _joined(parts: list[Any]) -> Any:
    """Outputs of all sequences, one after another; a layer may return something beside them, such as no scores."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(each)) for each in zip(*parts, strict=True))
    return torch.cat(parts, dim=1) if isinstance(parts[0], Tensor) else parts[0]


def _has_kernels(kind: Any, hidden: Tensor) -> bool:
    """Whether all that a layer computes along its sequence is done by kernels that are told where sequences begin."""
    used = _names(kind) & _KERNELS.keys()
    known = _module_globals(kind)
    return (
        hidden.is_cuda
        and bool(used)
        and all(hasattr(known.get(name), "__wrapped__") for name in used)  # else torch alone computes it
        and all(importlib.util.find_spec(_KERNELS[name]) is not None for name in used)
    )


@cache
def _names(kind: Any) -> frozenset[str]:
    """Names that the forward of a layer uses."""
    code = getattr(inspect.unwrap(_own_forward(kind)), "__code__", None)  # none of what is compiled
    return frozenset() if code is None else frozenset(code.co_names)


def _module_globals(kind: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = inspect.unwrap(_own_forward(kind)).__globals__
    return found


def _own_forward(kind: Any) -> Any:
    return next(base for base in kind.__mro__ if "forward" in vars(base) and base is not _PackedScan).forward
