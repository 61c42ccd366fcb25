"""Experts of a mixture in a Hugging Face model, by its own registry: in autocast's precision, and without waiting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_NAME = "flowtrain"
"""The function's name in ``transformers``, like ``"grouped_mm"``."""

_MARK = "has_packed_experts"
"""Attribute of modules that compute so: no public name of ``transformers`` says it."""


def pack_experts(model: Any) -> None:
    """Lets all experts of a layer compute in one product of matrices, each on the tokens that chose it.

    Which experts a token passes depends on the token alone, and no expert is ever full, so it is the same in any
    microbatch. The functions of ``transformers`` compute the same; but its ``"grouped_mm"``, which it takes by default,
    stays in float32 under autocast and knows no float64, and its others wait for the device or copy the weights for
    every token. In bfloat16 nothing waits here either; for other dtypes PyTorch has no such product on all devices, and
    the experts compute one after another.

    Experts that have more than a gate and two products, such as biases or norms, compute by their own code, one after
    another.

    Args:
        model: a ``transformers.PreTrainedModel``.
    """
    from transformers.integrations.moe import ExpertsInterface

    experts = [module for module in model.modules() if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)]
    if not all(map(_is_plain, experts)):
        model.set_experts_implementation("eager")
        return
    ExpertsInterface.register(_NAME, _packed_experts)
    model.set_experts_implementation(_NAME)
    for module in experts:
        setattr(module, _MARK, True)


def has_packed_experts(module: nn.Module) -> bool:
    """Whether a module is the experts of a layer, and computes by `pack_experts`."""
    return getattr(module, _MARK, False)


def _is_plain(experts: Any) -> bool:
    """Whether experts are a gate and two products, gates before what they let through."""
    more = ("has_bias", "has_post_expert_norm")
    return experts.has_gate and experts.is_concatenated and not any(getattr(experts, name, False) for name in more)


def _packed_experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """A function of experts as ``transformers`` calls it.

    Args:
        module: with ``gate_up_proj [experts, 2 * inner, width]`` and ``down_proj [experts, width, inner]``, or with
            the last two dimensions of both exchanged (``is_transposed``).
        hidden: ``[tokens, width]``.
        chosen: ``[tokens, experts of a token]`` int64, which experts a token passes.
        shares: ``[tokens, experts of a token]`` what each of them counts.

    Returns:
        ``[tokens, width]``, in the dtype of ``hidden``.
    """
    each = chosen.shape[1]
    by_expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(module.gate_up_proj.shape[0], device=chosen.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    # Each row is picked once, so that backwards add nothing up in an order of their own.
    rows = hidden.repeat_interleave(each, dim=0).index_select(0, order)
    wide, narrow = (w.mT if module.is_transposed else w for w in (module.gate_up_proj, module.down_proj))
    rows = module._apply_gate(_grouped_product(rows, wide, ends))  # its own where its class defines one
    rows = _grouped_product(rows, narrow, ends)
    rows = rows.index_select(0, order.argsort()).view(*chosen.shape, -1)
    return (rows * shares[..., None]).sum(dim=1, dtype=hidden.dtype)


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Every row times the matrix of its expert.

    Args:
        rows: ``[rows, inputs]``, sorted by expert.
        weights: ``[experts, outputs, inputs]``.
        ends: ``[experts]`` int32, where the rows of each expert end.

    Returns:
        ``[rows, outputs]``.
    """
    device = rows.device.type
    dtype = weights.dtype
    if device != "meta" and torch.is_autocast_enabled(device):  # which knows nothing of grouped products
        dtype = torch.get_autocast_dtype(device)
    rows, weights = rows.to(dtype), weights.to(dtype)
    if dtype == torch.bfloat16:
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(torch.split(rows, counts), weights, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])
