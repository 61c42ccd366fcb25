"""Selects the weights that train: adapters are added, and what stays frozen is kept in half the memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowtrain_lightning.parallel.experts.experts import number_of_experts


def adapters_as_dictionary(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A ``PeftConfig``, or its dictionary, as plain data, for checkpoints.

    Raises:
        TypeError: it is neither.
    """
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping) or "peft_type" not in given:
        raise TypeError(
            f"adapters is a {type(config).__name__}, but must be a config of peft, such as peft.LoraConfig(), or its "
            "dictionary with 'peft_type'."
        )
    plain: dict[str, Any] = json.loads(json.dumps(given, default=sorted))  # names of modules may be a set
    return plain


def add_adapters(model: Any, settings: Mapping[str, Any]) -> None:
    """Puts adapters into a model, in place. They train from now on, and so does what ``modules_to_save`` names.

    Args:
        model: a ``transformers.PreTrainedModel``.
        settings: see `adapters_as_dictionary`.

    Raises:
        ImportError: ``peft`` is not installed.
        ValueError: the config names no module of the model.
    """
    try:
        from peft import PeftConfig
    except ModuleNotFoundError as error:
        raise ImportError("Adapters need peft; install it with: pip install 'flowtrain-lightning[peft]'") from error
    model.add_adapter(PeftConfig.from_peft_type(**settings))


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
            layer.register_forward_pre_hook(_refuse_thawed)


def save_in_widest(model: Any, folder: str | Path) -> None:
    """Saves a model whose config names the widest dtype of its weights: opened again, none of them is rounded.

    ``transformers`` names that of the first weight, which may be one that is kept in bfloat16.

    Args:
        model: a ``transformers.PreTrainedModel``.
        folder: is made where it is not there.
    """
    model.save_pretrained(folder)
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    file = Path(folder) / "config.json"  # which adapters alone have not
    if len(dtypes) > 1 and file.is_file():
        widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**settings, "dtype": str(widest).removeprefix("torch.")}, indent=2) + "\n")


def _refuse_thawed(layer: nn.Module, _: Any) -> None:
    """Raises a ValueError where weights that were to stay frozen train: bfloat16 loses nearly all of small updates."""
    if any(weight.requires_grad for weight in layer.parameters()):
        raise ValueError(
            f"frozen_in_bf16 keeps weights that do not train in bfloat16, but those of a {type(layer).__name__} train "
            "since, whose updates would be rounded away. Leave frozen_in_bf16 out where weights are thawed later."
        )


def _rounds(name: str, module: nn.Module) -> bool:
    """Whether it rounds its weights; those of adapted experts ``peft`` adds to their adapters before."""
    is_adapted = name.endswith(".base_layer")
    return isinstance(module, nn.Linear) or (number_of_experts(module) is not None and not is_adapted)
