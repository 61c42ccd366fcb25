"""Orders of stages from costs: valid, within memory, never blocked, the same for the same graph, and shorter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.segments import MOST_IMAGES, under_wrong_costs
from flowtrain_lightning.packing.play import play
from flowtrain_lightning.packing.searched.chain_graph import Chain, ChainGraph, TimedStage, chain_graph
from flowtrain_lightning.packing.searched.searched_order import (
    Limits,
    ListedOrder,
    by_priority,
    greedy_order,
    searched_order,
)
from flowtrain_lightning.packing.step_graph import BatchOf, BlockedError, StepGraph, Work
from flowtrain_lightning.pool import Reservation, assign_offsets
from tests.packing.searched.random_graphs import most_kept, random_graph

PLAYS = 40


def limits_of(graph: ChainGraph, share: float) -> Limits:
    """Room for the largest work, and a share of all of them, in each store."""
    sums = np.bincount(graph.stores, graph.room, len(graph.most_room))
    return Limits.of(graph, graph.most_room + share * (sums - graph.most_room))


def check_order(graph: ChainGraph, found: ListedOrder, limits: Limits) -> None:
    """It has every work once, none before what it needs, and keeps within the limits."""
    place = np.empty(len(graph), dtype=np.int64)
    place[found.order] = np.arange(len(graph))
    assert sorted(found.order.tolist()) == list(range(len(graph)))
    assert all(place[needed] < place[work] for work, needs in enumerate(graph.needs) for needed in needs)
    assert (most_kept(graph, found.order, found.recomputed) <= limits.kept + 1e-6).all()
    assert found.takes(graph) == pytest.approx(found.seconds)


@pytest.mark.parametrize("graphs", [range(300), pytest.param(range(300, 1500), marks=pytest.mark.full)], ids=len)
def test_no_order_of_a_random_graph_exceeds_memory_or_blocks_at_the_least_bytes(graphs):
    for seed in graphs:
        graph = random_graph(seed)
        limits = limits_of(graph, (0.0, 0.1, 1.0)[seed % 3])
        for found in (greedy_order(graph, limits), searched_order(graph, limits, plays=30)):
            check_order(graph, found, limits)
            play_in_least_bytes(graph, found, seed)


def play_in_least_bytes(graph: ChainGraph, found: ListedOrder, seed: int) -> None:
    """Ranks put what others read into as few bytes as the order needs, and take random times: all come to the end.

    A rank overwrites bytes of a result once the last of its takers has begun; so each work needs what frees its bytes.
    """
    random = np.random.default_rng(seed)
    place = np.empty(len(graph), dtype=np.int64)
    place[found.order] = np.arange(len(graph))
    elsewhere: list[list[int]] = [[] for _ in range(len(graph))]  # who takes the result of each on other ranks
    for work, own in enumerate(graph.needs):
        for needed in own:
            elsewhere[needed] += [work] * bool(graph.ranks[work] != graph.ranks[needed])
    needs = [list(own) for own in graph.needs]
    for rank in range(int(graph.ranks.max()) + 1):
        puts = [work for work in found.order.tolist() if graph.ranks[work] == rank and elsewhere[work]]
        last = [max(place[taker] for taker in elsewhere[work]) for work in puts]
        held_until = [max(n for n, other in enumerate(puts) if place[other] < until) for until in last]
        sizes = [int(size) for size in random.integers(1, 9, len(puts))]
        reserved = [Reservation(size, released_after=n) for size, n in zip(sizes, held_until, strict=True)]
        offsets = assign_offsets(reserved).offsets if puts else []
        for n, work in enumerate(puts):
            for before in range(n):
                if offsets[before] < offsets[n] + sizes[n] and offsets[n] < offsets[before] + sizes[before]:
                    needs[work] += elsewhere[puts[before]]
    lanes = {
        rank: [[work for work in found.order.tolist() if graph.ranks[work] == rank]]
        for rank in range(int(graph.ranks.max()) + 1)
    }
    works = [Work(BatchOf("all", 0, work), "forward") for work in range(len(graph))]
    seconds = (graph.seconds * random.uniform(0.1, 2.0, len(graph))).tolist()
    play(StepGraph(works, needs, lanes), seconds, dict.fromkeys(lanes, 0.0))


def test_the_same_graph_gives_the_same_order():
    graph = random_graph(11)
    one, other = (searched_order(replace(graph), limits_of(graph, 0.2), plays=PLAYS) for _ in range(2))
    assert one.order.tolist() == other.order.tolist()
    assert one.recomputed.tolist() == other.recomputed.tolist()


def test_a_search_is_never_longer_than_greedy_or_than_what_it_was_given():
    for seed in range(20):
        graph = random_graph(seed)
        limits = limits_of(graph, 0.3)
        given = by_priority(graph, limits, np.random.default_rng(seed).random(len(graph)))
        found = searched_order(graph, limits, [given], plays=PLAYS)
        assert found.seconds <= min(given.seconds, greedy_order(graph, limits).seconds * 1.02)


def test_what_finds_no_room_is_computed_again_and_takes_its_forward_once_more():
    one = TimedStage(0, 1.0, 2.0, 1.0, 0)
    reading = TimedStage(0, 1.0, 2.0, 0.0, 0)
    graph = chain_graph([Chain(0, 0, (one,)), Chain(0, 0, (one,)), Chain(0, 1, (reading,), (0, 1))])
    ample, scarce = (greedy_order(graph, Limits.of(graph, np.array([kept]))) for kept in (2.0, 1.0))
    assert (ample.seconds, ample.recomputed.sum()) == (9.0, 0)
    assert (scarce.seconds, scarce.recomputed.sum()) == (11.0, 2)  # the room is left to what is computed again


def test_where_nothing_may_be_computed_again_a_lack_of_room_is_an_error():
    one = TimedStage(0, 1.0, 2.0, 1.0, 0)
    graph = chain_graph([Chain(0, 0, (one,)), Chain(0, 0, (one,)), Chain(0, 1, (one,), (0, 1))])
    with pytest.raises(BlockedError):
        greedy_order(graph, Limits(np.array([1.0]), np.zeros(1), np.zeros(1, dtype=np.bool_)))


def test_under_wrong_costs_a_searched_order_beats_the_static_one():
    ratios = under_wrong_costs(6)
    assert MOST_IMAGES == 48
    assert (ratios < 1).mean() >= 0.8
    assert ratios.max() <= 1.02


@pytest.mark.full
def test_under_wrong_costs_a_searched_order_beats_the_static_one_on_200_graphs():
    ratios = under_wrong_costs(200)
    assert (ratios < 1).mean() >= 0.8
    assert ratios.max() <= 1.02
