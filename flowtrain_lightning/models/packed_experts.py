"""Experts of a mixture in a Hugging Face model, by its own registry: in autocast's precision, and without waiting."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flowtrain_lightning.parallel.experts import compute_chosen, computing_dtype, grouped_product, mark_experts
from flowtrain_lightning.parallel.gradients import local_part

_NAME = "flowtrain"
"""The function's name in ``transformers``, like ``"grouped_mm"``."""


def pack_experts(model: Any) -> None:
    """Lets all experts of a layer compute in one product of matrices, each on the tokens that chose it.

    Which experts a token passes depends on the token alone, and no expert is ever full, so it is the same in any
    microbatch. The functions of ``transformers`` compute the same; but its ``"grouped_mm"``, which it takes by default,
    stays in float32 under autocast and knows no float64, and its others wait for the device or copy the weights for
    every token. See `grouped_product`.

    Args:
        model: a ``transformers.PreTrainedModel`` whose experts are gated (``gate_up_proj``, ``down_proj``), without
            biases, as Qwen's are.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_NAME, _packed_experts)
    model.set_experts_implementation(_NAME)
    for module in model.modules():
        if isinstance(stack := getattr(module, "gate_up_proj", None), nn.Parameter):
            mark_experts(module, len(stack))


def _packed_experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """A function of experts as ``transformers`` calls it.

    Args:
        module: with ``gate_up_proj [experts, 2 * inner, width]`` and ``down_proj [experts, width, inner]``.
        hidden: ``[tokens, width]``.
        chosen: ``[tokens, experts of a token]`` int64, which experts a token passes.
        shares: ``[tokens, experts of a token]`` what each of them counts.

    Returns:
        ``[tokens, width]``, in the dtype of ``hidden``.
    """
    widen, narrow = local_part(module.gate_up_proj), local_part(module.down_proj)

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_product(rows, widen, ends).chunk(2, dim=-1)
        return grouped_product(module.act_fn(gate) * up, narrow, ends)

    return compute_chosen(module, hidden, chosen, shares, compute, dtype=computing_dtype(widen))
