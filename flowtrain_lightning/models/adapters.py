"""Adapters of ``peft``, such as LoRA and DoRA, in a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
