"""Bytes that stages keep whose backwards are in two parts: what a weight's gradient is made of, until it is made."""

from __future__ import annotations

from flowtrain_lightning.allocator.module_parts import Dense, Layers, Part

_WIDEST = 8
"""Outputs for each input of a product up to which the gradient of its weight is made later. Of a head all gradients of
logits would be kept till then, for which losses in chunks of tokens never have room."""


def is_made_later(inputs: int, outputs: int) -> bool:
    """Whether the gradient of a product's weight is left for the second part of a backward."""
    return outputs <= _WIDEST * inputs


def late_bytes(part: Layers, width: int, casts: bool = False) -> float:
    """Bytes per token that one layer keeps between both parts of its backward: inputs of products, and gradients.

    Those of experts are made with the first part, so that nothing of them is kept.

    Args:
        part: the layers.
        width: bytes of a number.
        casts: each product casts what it takes, so that those of one input keep a copy each.
    """
    if part.trained_parameters == 0:
        return 0.0
    inner = part.feed_forward if part.experts is None else part.experts.shared
    up = (2 if part.gated else 1) * inner
    attention = part.hidden * (3 if casts and not part.fused else 1) + 2 * part.query_width + 2 * part.key_value_width
    network = part.hidden * (2 if casts and part.gated else 1) + inner + up + part.hidden
    return width * (attention + part.hidden + network * (inner > 0))


def late_bytes_outside(part: Part, width: int) -> float:
    """The same of a product outside of layers, such as a projector."""
    if not isinstance(part, Dense) or not part.trainable or not is_made_later(part.inputs, part.outputs):
        return 0.0
    return width * part.copies * part.per_token * (part.inputs + part.outputs)
