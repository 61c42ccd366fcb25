"""The choice of what stages keep, compute again or move: within the limit, and as cheap as can be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.packing.searched.memory_choice import MemoryChoices, chosen_memory, given_up, with_choices
from flowtrain_lightning.packing.searched.searched_order import Limits, greedy_order
from tests.packing.searched.random_graphs import most_kept, random_graph


def choices_for(graph, seed):
    random = np.random.default_rng(seed)
    pairs = np.flatnonzero(graph.room > 0)
    room = np.column_stack([graph.room[pairs] * share for share in (1.0, 0.5, 0.1)])
    seconds = np.column_stack([np.zeros(len(pairs)), *random.uniform(1, 9, (2, len(pairs)))])
    return MemoryChoices(pairs, seconds, room, np.zeros(len(pairs)))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_never_exceeds_the_limit(seed):
    graph = random_graph(seed)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    choices, most = choices_for(graph, seed), most_kept(graph, listed.order, listed.recomputed)
    limits = 0.4 * most
    chosen = with_choices(graph, choices, chosen_memory(graph, listed.order, choices, limits))
    assert (most_kept(chosen, listed.order, listed.recomputed) <= limits * (1 + 1e-6)).all()
    assert chosen.seconds.sum() >= graph.seconds.sum()


def test_with_room_for_everything_everything_is_kept():
    graph = random_graph(3)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    choices = choices_for(graph, 3)
    assert not chosen_memory(graph, listed.order, choices, np.full(len(graph.most_room), 1e9)).any()


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
    assert seconds(chosen_memory(graph, listed.order, choices, limits)) <= best * 1.05


def test_even_the_least_over_the_limit_is_an_error():
    graph = random_graph(3)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    with pytest.raises(ValueError, match="Let fewer batches be open"):
        chosen_memory(graph, listed.order, choices_for(graph, 3), np.full(len(graph.most_room), 1e-3))


def held_at_most(graph, order, room, gone):
    """``[ranks]`` the most bytes that each holds; what gives up its own has them while its works run."""
    held, most = np.zeros(graph.ranks.max() + 1), np.zeros(graph.ranks.max() + 1)
    for work in order.tolist():
        rank, forward = graph.ranks[work], max(work if graph.forward_of[work] < 0 else graph.forward_of[work], 0)
        kept = room[forward] * (not gone[forward])
        held[rank] += kept * (work == forward)
        most[rank] = max(most[rank], held[rank] + room[forward] * gone[forward])
        held[rank] -= kept * (work != forward)
    return most


def step_of(seed):
    """A graph, its order, and bytes of what has a backward."""
    graph = random_graph(seed)
    listed = greedy_order(graph, Limits.of(graph, np.full(len(graph.most_room), np.inf)))
    room = np.zeros(len(graph))
    has_backward = graph.forward_of[graph.is_backward]
    room[has_backward] = np.random.default_rng(seed).uniform(1, 9, len(has_backward)).round(3)
    return graph, listed.order, room


def limits_between(graph, order, room, share):
    """``[ranks]`` so much of what lies between the largest batch of each and all that it would keep."""
    largest = np.zeros(graph.ranks.max() + 1)
    np.maximum.at(largest, graph.ranks, room)
    everything = held_at_most(graph, order, room, np.zeros(len(graph), dtype=bool))
    return largest + share * (everything - largest)


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 600), marks=pytest.mark.full)], ids=len)
def test_no_rank_ever_holds_more_than_its_limit_and_none_gives_up_in_vain(seeds):
    for seed in seeds:
        graph, order, room = step_of(seed)
        always = np.zeros(len(graph), dtype=bool)
        for share in (0.0, 0.3, 1.0):
            limits = limits_between(graph, order, room, share)
            gone = given_up(graph, order, room, always, limits)
            assert (held_at_most(graph, order, room, gone) <= limits * (1 + 1e-9)).all(), (seed, share)
            assert not (gone & graph.is_backward).any()
            assert share < 1.0 or not gone.any()


def test_the_same_step_gives_up_the_same_every_time():
    graph, order, room = step_of(7)
    limits, always = limits_between(graph, order, room, 0.2), np.zeros(len(graph), dtype=bool)
    one, other = (given_up(graph, order.copy(), room, always, limits) for _ in range(2))
    assert one.any()
    assert one.tolist() == other.tolist()


def test_of_what_is_given_up_anyway_nothing_is_kept_and_others_have_its_room():
    graph, order, room = step_of(7)
    limits = limits_between(graph, order, room, 0.2)
    always = given_up(graph, order, room, np.zeros(len(graph), dtype=bool), limits)
    assert given_up(graph, order, room, always, limits).tolist() == always.tolist()


def test_a_batch_that_alone_exceeds_the_limit_is_an_error():
    graph, order, room = step_of(7)
    limits = limits_between(graph, order, room, 0.0) * 0.9
    with pytest.raises(PackingError, match="one batch alone finds no room"):
        given_up(graph, order, room, np.zeros(len(graph), dtype=bool), limits)
