"""Describes repeated layers of a built model for planning: attention by its heads, all else by its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from flowtrain_lightning.allocator import PlanningError
from flowtrain_lightning.allocator.module_parts import Layers, MixtureOfExperts, Norms
from flowtrain_lightning.models.packed_scans import is_scan
from flowtrain_lightning.parallel.blocks import repeated_blocks

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_SIZE = ("head_dim", "head_size", "attention_head_size")
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts", "top_k", "num_experts_per_token")
_NONE = 1
"""Tokens that the attention of a layer without any spans: each sees itself."""

_GATES = ("gate_proj", "gate_up_proj", "up_gate_proj", "w3")
"""Names of the third matrix of a gated perceptron."""

_HEAD_NORMS = ("q_norm", "q_layernorm")
"""Names of a norm of queries."""

_IN_FLOAT32 = ("Gemma", "Qwen3_5", "Qwen3Next")
"""How classes of norms begin whose weights multiply in float32."""


class LayerKind(NamedTuple):
    """Equal for layers that cost the same.

    Attributes:
        layer: their class.
        window: tokens that their attention spans; 1 of a scan or convolution; None is the sequence.
        sizes: of their weights.
    """

    layer: type[nn.Module]
    window: int | None
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, block: nn.Module, number: int) -> LayerKind:
        """The kind of a layer.

        Args:
            block: a repeated layer.
            number: its number among those of its tower or decoder.
        """
        return cls(type(block), _window(block, number), tuple(sorted(tuple(part.shape) for part in block.parameters())))


def layers_of(half: nn.Module) -> list[nn.Module]:
    """Repeated blocks of the kinds that attend or scan, and not perceptrons that a tower has several of."""
    blocks = repeated_blocks(half)
    kinds = {type(block) for block in blocks if _attends(block) or _scans(block)}
    return [block for block in blocks if type(block) in kinds]


def described_layers(blocks: Sequence[nn.Module], window: int | None, *, causal: bool) -> Layers:
    """Layers of one kind. What their attention, experts and norms leave of their weights is the perceptron's.

    Args:
        blocks: of one `LayerKind`.
        window: see there.
        causal: a token attends to itself and what is before it.

    Raises:
        PlanningError: there is no matrix in them, or no number of heads.
    """
    block = blocks[0]
    hidden, heads = _hidden(block), _heads(block, window)
    key_value = min(_number(block, ("num_key_value_heads",)) or heads, heads)
    names = {name for path, _ in block.named_parameters() for name in path.split(".")}
    matrices = 3 if names & {*_GATES} else 2
    left = sum(weight.numel() for weight in block.parameters()) - 2 * hidden
    experts = _experts(block, hidden, matrices)
    if experts is not None:
        left -= hidden * (matrices * experts.count * experts.feed_forward + experts.count)
    size = _number(block, _HEAD_SIZE) or hidden // heads
    size = max(1, min(size, left // (2 * hidden * (heads + key_value))))
    inner = max(0, left - 2 * hidden * size * (heads + key_value)) // (matrices * hidden)
    if experts is not None:
        experts = MixtureOfExperts(experts.count, experts.chosen, experts.feed_forward, inner)
    return Layers(
        count=len(blocks),
        hidden=hidden,
        feed_forward=inner,
        heads=heads,
        key_value_heads=key_value,
        head_size=size,
        gated=matrices == 3,
        causal=causal,
        window=window,
        experts=experts,
        fused=any("qkv" in name for name in names),
        norms=_norms(block, hidden),
    )


def _hidden(block: nn.Module) -> int:
    """The width that most matrices have at one side."""
    sides = Counter(
        side
        for part in block.modules()
        if isinstance(part, nn.Linear)
        for side in {part.in_features, part.out_features}
    )
    if not sides:
        raise PlanningError(
            f"{type(block).__name__} has no matrices, so that its cost is not known. Give the module's dimensions "
            "instead (see docs/planning.md)."
        )
    return sides.most_common(1)[0][0]


def _norms(block: nn.Module, hidden: int) -> Norms:
    """The norms of a layer: those of the residual stream are parts of the layer itself."""
    wide = [part for part in block.children() if "Norm" in type(part).__name__ and hidden in _shape_of(part)]
    heads = any(name.rpartition(".")[2] in _HEAD_NORMS for name, _ in block.named_modules())
    return Norms(max(2, len(wide)), heads, any(type(part).__name__.startswith(_IN_FLOAT32) for part in wide))


def _shape_of(norm: nn.Module) -> tuple[int, ...]:
    return next((tuple(weight.shape) for weight in norm.parameters()), ())


def _heads(block: nn.Module, window: int | None) -> int:
    heads = _number(block, _HEADS) or (1 if window == _NONE else None)
    if heads is None:
        raise PlanningError(
            f"{type(block).__name__} does not say how many heads it has ({', '.join(_HEADS)}). Give the module's "
            "dimensions instead (see docs/planning.md)."
        )
    return heads


def _experts(block: nn.Module, hidden: int, matrices: int) -> MixtureOfExperts | None:
    """A layer's experts, whose matrices lie in one tensor for all, in one group or several."""
    groups = [
        [weight for weight in part.parameters(recurse=False) if weight.ndim == 3]
        for part in block.modules()
        if not isinstance(part, nn.Conv1d)
    ]
    groups = [group for group in groups if group]
    if not groups:
        return None
    smallest = min(groups[0], key=lambda weight: weight.numel())
    width = smallest.numel() // (smallest.shape[0] * hidden)
    weights = sum(weight.numel() for group in groups for weight in group)
    count = max(1, weights // (matrices * hidden * width))
    return MixtureOfExperts(count, min(_number(block, _CHOSEN) or 1, count), width)


def _attends(block: nn.Module) -> bool:
    return any("attn" in name or "attention" in name for name, _ in block.named_modules())


def _scans(block: nn.Module) -> bool:
    return any(is_scan(part) for part in block.modules())


def _window(block: nn.Module, number: int) -> int | None:
    if _scans(block) or not _attends(block):
        return _NONE
    for part in block.modules():
        config: Any = getattr(part, "config", None)
        full = getattr(config, "fullatt_block_indexes", None)
        if full is not None and number not in full:
            return int(config.window_size // config.patch_size) ** 2
        if isinstance(window := getattr(part, "sliding_window", None), int) and window > 0:
            return window
        if isinstance(side := getattr(part, "window_size", None), int) and side > 0:  # of SAM's towers, in patches
            return side**2
    return None


def _number(block: nn.Module, names: Sequence[str]) -> int | None:
    """The first number above 0 that a module of a layer, or its config, has by one of some names."""
    for part in block.modules():
        for owner in (part, getattr(part, "config", None)):
            for name in names:
                value: Any = getattr(owner, name, None)
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None
