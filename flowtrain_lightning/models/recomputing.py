"""Lets layers of a Hugging Face model keep less, and compute it a second time for their backward."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from flowtrain_lightning.parallel.blocks import recompute_in_backward, repeated_blocks

Recomputing = bool | Literal["selective"]


def refuse_unknown_recomputing(recompute: object) -> None:
    """Raises for what `recompute_layers` does not take.

    Raises:
        ValueError: says what it takes.
    """
    if recompute not in (True, False, "selective"):
        raise ValueError(
            f"recompute={recompute!r} was given. Take True (layers compute all again but what they are given), "
            "'selective' (all but products of matrices and attention) or False (nothing)."
        )


def recompute_layers(model: Any, recompute: Recomputing) -> None:
    """Lets the repeated layers of both halves keep less.

    Args:
        model: a ``transformers.PreTrainedModel``.
        recompute: what they compute again, see `HuggingFaceVLM`.
    """
    if recompute == "selective":
        for block in repeated_blocks(model):
            recompute_in_backward(block, "selective")
    elif recompute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its new name is known from transformers 5.23 on only
            model.gradient_checkpointing_enable()
        model.disable_input_require_grads()  # else the backward goes through frozen parts too
