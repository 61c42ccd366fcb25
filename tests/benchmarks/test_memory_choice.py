"""The choice of what stages keep, compute again or move: within the limit, and as cheap as can be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.memory_choice import Layer, MemoryChoices, choices_of, chosen_memory, with_choices
from flowtrain_lightning.packing.searched.searched_order import Limits, greedy_order
from tests.packing.searched.random_graphs import most_kept, random_graph


def choices_for(graph, seed):
    random = np.random.default_rng(seed)
    pairs = np.flatnonzero(graph.room > 0)
    room = np.column_stack([graph.room[pairs] * share for share in (1.0, 0.5, 0.1)])
    return MemoryChoices(pairs, np.column_stack([np.zeros(len(pairs)), *random.uniform(1, 9, (2, len(pairs)))]), room)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_never_exceeds_the_limit(seed):
    graph = random_graph(seed)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    choices, most = choices_for(graph, seed), most_kept(graph, listed.order, listed.recomputed)
    limits = 0.4 * most
    chosen = with_choices(graph, choices, chosen_memory(graph, listed, choices, limits))
    assert (most_kept(chosen, listed.order, listed.recomputed) <= limits * (1 + 1e-6)).all()
    assert chosen.seconds.sum() >= graph.seconds.sum()


def test_with_room_for_everything_everything_is_kept():
    graph = random_graph(3)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    choices = choices_for(graph, 3)
    assert not chosen_memory(graph, listed, choices, np.full(len(graph.most_room), 1e9)).any()


def test_a_choice_is_as_cheap_as_the_best_of_all_combinations():
    graph = next(found for seed in range(99) if 3 <= ((found := random_graph(seed, most_units=2)).room > 0).sum() <= 7)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    choices, most = choices_for(graph, 5), most_kept(graph, listed.order, listed.recomputed)
    limits, every = 0.6 * most, np.arange(len(choices.forwards))

    def seconds(ways):
        return choices.seconds[every, list(ways)].sum()

    def fits(ways):
        tried = with_choices(graph, choices, np.array(ways))
        return (most_kept(tried, listed.order, listed.recomputed) <= limits * (1 + 1e-9)).all()

    best = min(seconds(ways) for ways in product(range(3), repeat=len(every)) if fits(ways))
    assert seconds(chosen_memory(graph, listed, choices, limits)) <= best * 1.05


def test_even_the_least_over_the_limit_is_an_error():
    graph = random_graph(3)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    with pytest.raises(ValueError, match="Let fewer batches be open"):
        chosen_memory(graph, listed, choices_for(graph, 3), np.full(len(graph.most_room), 1e-3))


def test_layers_are_computed_again_or_moved_in_part_by_part():
    graph = random_graph(3)
    layer = Layer(forward=4.0, room=10.0, entry=1.0, moving=1.0)
    found = choices_of(graph, [(layer, 2)] * len(graph), steps=2)
    assert found.seconds[0].tolist() == [0.0, 4.0, 8.0, 1.0, 2.0]
    assert found.room[0].tolist() == [20.0, 11.0, 2.0, 10.0, 0.0]
