"""Refuses what ties samples that are packed together: losses over all tokens, and positions that follow the longest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn


def refuse_balancing_loss(config: Any) -> None:
    """Refuses mixtures whose experts are to be balanced by a loss of their own.

    Raises:
        ValueError: says what to set.
    """
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "The model's config has output_router_logits on, which adds a loss that balances the experts over all "
            "tokens of a batch. It would depend on how samples are packed, and is not computed here: set "
            "text_config.output_router_logits to false. Experts of your own stay equally full without a loss by "
            "flow.Experts(balance=0.001)."
        )


def refuse_growing_positions(decoder: Any) -> None:
    """Lets a decoder refuse sequences so long that its rotary positions change with them.

    Up to a number of tokens, rotary positions of type ``"dynamic"`` and ``"longrope"`` are the same for all sequences.
    Beyond it they follow the longest sequence of a microbatch, for whatever else is packed beside it, too.

    Args:
        decoder: of ``transformers``; its forward is given `sequence_bounds`, else nothing is refused.
    """
    limits = [limit for rope in _ropes(decoder.config) if (limit := _unchanged(decoder.config, rope)) is not None]
    if limits:
        decoder.register_forward_pre_hook(partial(_refuse_longer, min(limits)), with_kwargs=True)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Settings of rotary positions, of all layers or of each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    yield from (rope for rope in (given, *given.values()) if isinstance(rope, Mapping) and "rope_type" in rope)


def _unchanged(config: Any, rope: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that has the positions of any shorter one; None where all have."""
    if "dynamic" in rope["rope_type"]:
        return int(config.max_position_embeddings)
    if rope["rope_type"] == "longrope":
        return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return None


def _refuse_longer(limit: int, decoder: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    longest = kwargs.get("max_length_q", 0)
    if longest > limit:
        raise ValueError(
            f"A sequence of {longest} tokens came to {type(decoder).__name__}, whose rotary positions change beyond "
            f"{limit} tokens, for all sequences that are packed beside it. Keep samples shorter: "
            "FlowDataModule(token_budget=...)."
        )
