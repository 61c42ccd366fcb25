"""Refuses padding where tokens are counted to keep experts equally full: padding tokens would be counted, too."""

from __future__ import annotations

from typing import Any

from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.parallel.experts.expert_counts import is_balanced


def refuse_padding_beside_balance(module: Any, data: Any) -> None:
    """Raises where microbatches are filled up, so that biases of experts would depend on how samples are packed.

    Args:
        module: a FlowModule that trains.
        data: the Trainer's data module.

    Raises:
        ValueError: names the experts, and what to do.
    """
    if not isinstance(data, FlowDataModule) or not data.packing.pad_to_budget:
        return
    balanced = next((name for name, part in module.named_modules() if is_balanced(part)), None)
    if balanced is not None:
        raise ValueError(
            f"{balanced!r} has balance={module.get_submodule(balanced).balance.rate}, which counts the tokens that "
            "choose each expert, and PackingConfig(pad_to_budget=True) adds tokens that no sample has. Leave one out."
        )
