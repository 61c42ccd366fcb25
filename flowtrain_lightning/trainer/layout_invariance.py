"""Finds parts of a module whose gradients depend on how samples are packed, and names them in the log."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from flowtrain_lightning.packing_check import dropout_settings

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_EXPERTS = "auxiliary losses of experts"
_EXPERTS = re.compile("moe|router|expert", re.IGNORECASE)


def not_layout_invariant(module: nn.Module) -> list[str]:
    """Sentences for the log, one for each reason that occurs.

    Random masks follow the microbatch and not the sample; batch statistics, and auxiliary losses over all tokens of a
    microbatch, couple samples. Everything else gives the same gradients on every layout. What a module does in
    functions cannot be seen; experts are told by the names of their classes, and Hugging Face's have no auxiliary loss
    where the model's config has ``output_router_logits`` off.
    """
    found: dict[str, list[str]] = {}
    without_auxiliary_loss: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if _has_auxiliary_loss_off(layer):
            without_auxiliary_loss |= {*layer.modules()}
        reason = _reason(layer)
        if reason is not None and not (reason == _OF_EXPERTS and layer in without_auxiliary_loss):
            found.setdefault(reason, []).append(f"{name} ({type(layer).__name__})")
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason} depend on how samples are "
        "packed, so gradients differ a little between layouts."
        for reason, names in found.items()
    ]


def _reason(layer: nn.Module) -> str | None:
    if dropout_settings(layer):
        return "random masks"
    if isinstance(layer, _BATCH):
        return "batch statistics"
    if _EXPERTS.search(type(layer).__name__):
        return _OF_EXPERTS
    return None


def _has_auxiliary_loss_off(layer: nn.Module) -> bool:
    """Whether it is a model of Hugging Face that gives nothing to balance its experts by."""
    config: Any = getattr(layer, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "output_router_logits", None) is False
