"""Ways to keep activations layer by layer."""

from __future__ import annotations

from benchmarks.memory_choice import Layer, choices_of
from tests.packing.searched.random_graphs import random_graph


def test_layers_are_computed_again_or_moved_in_part_by_part():
    graph = random_graph(3)
    layer = Layer(forward=4.0, room=10.0, entry=1.0, moving=1.0)
    found = choices_of(graph, [(layer, 2)] * len(graph), steps=2)
    assert found.seconds[0].tolist() == [0.0, 4.0, 8.0, 1.0, 2.0]
    assert found.room[0].tolist() == [20.0, 11.0, 2.0, 10.0, 0.0]
