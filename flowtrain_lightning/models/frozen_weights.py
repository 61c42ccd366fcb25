"""Weights that do not train, kept in half the memory."""

from __future__ import annotations

import torch
from torch import nn

PRECISION = "bf16-mixed"
"""Under which a linear layer rounds its weights to bfloat16 whenever it computes."""


def keep_frozen_in_bf16(model: nn.Module) -> None:
    """Rounds the weights of linear layers of which nothing trains to bfloat16, once and for all.

    Under bf16-mixed precision that changes no bit of what is computed. Embeddings, norms and convolutions stay as they
    are: in bfloat16 they would give other results. So does a layer whose weight another module has, too.

    Args:
        model: what trains of it is known (``requires_grad``).
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = {
        id(weight)
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for weight in module.parameters(recurse=False)
    }
    for layer in layers:
        if not any(weight.requires_grad or id(weight) in others for weight in layer.parameters()):
            layer.to(torch.bfloat16)
