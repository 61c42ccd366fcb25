"""Ways to keep activations layer by layer: so many layers of a stage compute theirs again, or move them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flowtrain_lightning.packing.searched.chain_graph import ChainGraph
from flowtrain_lightning.packing.searched.memory_choice import MemoryChoices


class Layer(NamedTuple):
    """The activations of one layer of a stage, for one batch.

    Attributes:
        forward: seconds in which it computes them again.
        room: of all of them.
        entry: of what comes in, from which they are computed again.
        moving: seconds that it takes to move them to host memory and back, beyond what happens beside computing; None
            where they are not to be moved.
    """

    forward: float
    room: float
    entry: float
    moving: float | None = None


def choices_of(graph: ChainGraph, layers: Sequence[tuple[Layer, float]], steps: int = 4) -> MemoryChoices:
    """Choices for each pair: so many of ``steps`` parts of its layers computed again, or moved, and the rest kept.

    Args:
        graph: of the step.
        layers: ``[works]`` a layer of each one's stage, and how many it has; if need be, on average.
        steps: into how many parts layers are divided.
    """
    pairs = np.flatnonzero(graph.room > 0)
    shares = [part / steps for part in range(steps + 1)]
    seconds, room = [], []
    for work in pairs.tolist():
        layer, count = layers[work]
        moving = layer.forward if layer.moving is None else layer.moving
        moved = 0.0 if layer.moving is not None else layer.entry
        ways = [(share * layer.forward, layer.room + share * (layer.entry - layer.room)) for share in shares]
        ways += [(share * moving, layer.room + share * (moved - layer.room)) for share in shares[1:]]
        seconds.append([count * time for time, _ in ways])
        room.append([count * kept for _, kept in ways])
    return MemoryChoices(pairs, np.array(seconds), np.array(room), np.zeros(len(pairs)))
