"""Divides a half among the ranks of a tensor group, as far as that can be done; the rest each of them has whole."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.module_parts import Layers, Part


@dataclass(frozen=True)
class Division:
    """Tensor ranks that share the work of a layer.

    Attributes:
        attention: ranks that share attention, and the tokens of norms and sums.
        feed_forward: ranks that share the feed-forward network.
    """

    attention: int = 1
    feed_forward: int = 1


def division(half: Half, part: Layers, tensor: int) -> Division:
    """The division of one of a half's layers among ``tensor`` ranks."""
    if not half.perceptrons_only:
        return Division(tensor, tensor)
    return Division(1, 1 if part.feed_forward % tensor else tensor)


def sharers(half: Half, width: int, tensor: int) -> int:
    """Of ``tensor`` ranks those that divide a matrix outside of layers, or an embedding, by a width: all, or none."""
    return 1 if half.perceptrons_only or width % tensor else tensor


def parameters_of_rank(half: Half, part: Part, tensor: int) -> float:
    """Numbers of a part that one of ``tensor`` ranks has."""
    if not isinstance(part, Layers):
        return part.parameters / sharers(half, part.divided_width, tensor)
    of = division(half, part, tensor)
    attention = part.attention_parameters + 2 * part.hidden + part.adapters * part.adapted_width
    rest = part.layer_parameters - attention
    # Beside experts a layer's router and shared network are whole: each rank computes them for its share of the tokens.
    whole = 0 if part.experts is None else rest - part.expert_parameters
    return part.count * (attention / of.attention + (rest - whole) / of.feed_forward + whole)


def share_of_rank(half: Half, tensor: int) -> float:
    """Share of a half's parameters that one of ``tensor`` ranks has."""
    return sum(parameters_of_rank(half, part, tensor) for part in half.parts) / max(1, half.parameters)


def experts_share(half: Half, tensor: int) -> float:
    """Share of what one of ``tensor`` ranks has of a half that its experts are, which tensor ranks divide."""
    experts = sum(part.count * part.expert_parameters for part in half.layers) / tensor
    return experts / max(1, half.parameters * share_of_rank(half, tensor))
