"""Experts of a mixture in a Hugging Face model, by its own registry: in autocast's precision, and without waiting."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flowtrain_lightning.parallel.experts.expert_adapters import own_stack
from flowtrain_lightning.parallel.experts.experts import compute_chosen, computing_dtype, grouped_product, mark_experts

_NAME = "flowtrain"
"""The function's name in ``transformers``, like ``"grouped_mm"``."""


def pack_experts(model: Any) -> None:
    """Lets all experts of a layer compute in one product of matrices, each on the tokens that chose it.

    Which experts a token passes depends on the token alone, and no expert is ever full, so it is the same in any
    microbatch. The functions of ``transformers`` compute the same; but its ``"grouped_mm"``, which it takes by default,
    stays in float32 under autocast and knows no float64, and its others wait for the device or copy the weights for
    every token. See `grouped_product`.

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
        mark_experts(module, len(module.gate_up_proj))


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
    stacks = (own_stack(module, name) for name in ("gate_up_proj", "down_proj"))
    wide, narrow = (stack.mT if module.is_transposed else stack for stack in stacks)

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        gated = module._apply_gate(grouped_product(rows, wide, ends))  # its own where its class defines one
        return grouped_product(gated, narrow, ends)

    return compute_chosen(module, hidden, chosen, shares, compute, dtype=computing_dtype(wide))
