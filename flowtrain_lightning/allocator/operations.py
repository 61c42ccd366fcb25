"""Counts eager operations around the products of a layer, and the bytes that they move.

`Coefficients.memory` was fitted to MPT's code, whose norms are one operation each and which rotates nothing: as many
bytes as there would be if every part read its inputs and wrote its result once count there. Code in other forms is
counted beside it, operation by operation, at the share of the bandwidth that a single one reaches.
"""

from __future__ import annotations

from flowtrain_lightning.allocator.division import Division
from flowtrain_lightning.allocator.module_parts import Layers

_ALONE = 0.85
"""Share of the memory bandwidth of one operation over large tensors: a copy's, by vendors' own measurements."""

_FITTED = 0.41
"""The fitted share, `Coefficients.memory`, in which bytes are counted here."""

_IN_FITTED = _FITTED / _ALONE

_RMS_NORM = 8
"""Operations of a norm by the root mean square, as models of Hugging Face have it: to float32, square, mean, plus,
inverse root, times, back, times the weight."""

_RMS_NORM_WIDTHS = 18.0
"""Numbers of 2 bytes that these read and write for each that is normalised: 3 + 4 + 2 + 4 + 3 + 2."""

_LAYER_NORM_WIDTHS = 10.0
"""The same of a layer norm that autocast runs in float32: to float32, the norm, and back for the product behind it."""

_ROTATION, _FLOAT_ROTATION = 5, 7
"""Operations that rotate queries, or keys: negate a half, put together, two products, a sum; and in float32 there and
back, as of the towers of Qwen's models."""

_ROTATION_WIDTHS, _FLOAT_ROTATION_WIDTHS = 10.0, 26.0
"""Numbers of 2 bytes that these read and write for each that is rotated; of these towers queries, keys and values are
one product."""

_ROUTING = 18
"""Operations that choose experts, sort tokens by them and put the results back."""

_TRADING = 20
"""Operations that bring rows to the ranks that share experts, and the results back."""

_COPIES, _COPIES_OF_DIVIDED, _FUSED_COPIES = 9.5, 13.9, 4.0
"""Numbers that are read and written for each one of a row that passes an expert, beside products: repeated for each
expert, sorted, put back, weighed and summed. Ranks that share experts sort rows twice. Fused kernels sort while they
repeat, and put back while they sum."""

_CASTS = 4
"""Operations that cast what four products read to 8 bits, scaled and transposed: one for each (Transformer Engine)."""

_ADAPTED = 5
"""Operations of an adapter: a cast, two products, a scale and a sum."""


def operations(part: Layers, *, eight_bits: bool = False, divided: bool = False) -> int:
    """Operations that a layer's forward starts; views are none. As counted on models of Hugging Face.

    Args:
        part: the layers.
        eight_bits: inputs of products are cast before each of them.
        divided: ranks share experts.
    """
    norms = 2 * (_RMS_NORM if part.gated else 1)
    rotations = 2 * (_FLOAT_ROTATION if part.fused else _ROTATION) if part.gated or part.fused else 0
    attention = (1 if part.fused else 3) + 1 + 1  # queries, keys and values; attention; its projection
    perceptron = 5 if part.gated else 3
    adapters = _ADAPTED * (7 if part.gated else 6) if part.adapters else 0
    routing = _ROUTING + _TRADING * divided if part.experts is not None else 0
    casts = _CASTS if eight_bits else 0
    return norms + rotations + attention + perceptron + 2 + adapters + routing + casts


def moved_bytes(part: Layers, width: int, ranks: Division, *, eager: bool, divided: bool = False) -> float:
    """Bytes per token that a layer's norms, residuals, rotations and activations read and write, forward.

    Two norms read and write the hidden state, two sums read two and write one, the rotation reads and writes queries
    and keys, and a fused activation reads its inputs and writes its output. Eager code in Llama's form, and towers
    under autocast, do the norms and rotations step by step. Tokens of experts are copied to these and back; a backward
    moves twice as much.

    Args:
        part: the layers.
        width: bytes of a number.
        ranks: tensor ranks that share the layer.
        eager: norms, rotations and copies for experts are not fused.
        divided: ranks share experts.
    """
    norm, rotation = 2.0, 2.0
    if eager and part.gated:
        norm, rotation = _RMS_NORM_WIDTHS * _IN_FITTED, _ROTATION_WIDTHS * _IN_FITTED
    elif eager and not part.causal:
        norm = _LAYER_NORM_WIDTHS * _IN_FITTED
    if eager and part.fused:
        rotation = _FLOAT_ROTATION_WIDTHS * _IN_FITTED
    residual = (2 * norm + 6) * part.hidden
    rotated = rotation * (part.query_width + part.key_value_width)
    activation = (3 if part.gated else 2) * part.active_feed_forward
    copies = (_COPIES_OF_DIVIDED if divided else _COPIES) if eager else _FUSED_COPIES
    copied = 0.0 if part.experts is None else copies * _IN_FITTED * part.experts.chosen * part.hidden
    return width * ((residual + rotated) / ranks.attention + (activation + copied) / ranks.feed_forward)
