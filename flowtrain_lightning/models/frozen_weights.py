"""Weights that do not train, kept in half the memory."""

from __future__ import annotations

import torch
from torch import nn

from flowtrain_lightning.models.packed_experts import has_packed_experts

PRECISION = "bf16-mixed"
"""Under which linear layers, and packed experts, round their weights to bfloat16 whenever they compute."""


def keep_frozen_in_bf16(model: nn.Module) -> None:
    """Rounds the weights of linear layers and experts of which nothing trains to bfloat16, once and for all.

    Under bf16-mixed precision that changes no bit of what is computed. Embeddings, norms and convolutions stay as they
    are: in bfloat16 they would give other results. So does a layer whose weight another module has, too.

    Args:
        model: what trains of it is known (``requires_grad``).
    """
    layers = [module for name, module in model.named_modules() if _rounds(name, module)]
    others = {
        id(weight)
        for name, module in model.named_modules()
        if not _rounds(name, module)
        for weight in module.parameters(recurse=False)
    }
    for layer in layers:
        if not any(weight.requires_grad or id(weight) in others for weight in layer.parameters()):
            layer.to(torch.bfloat16)


def _rounds(name: str, module: nn.Module) -> bool:
    """Whether it rounds its weights; those of adapted experts ``peft`` adds to their adapters before."""
    is_adapted = name.endswith(".base_layer")
    return isinstance(module, nn.Linear) or (has_packed_experts(module) and not is_adapted)
