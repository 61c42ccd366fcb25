"""Random chains of stages, of several roles, through the ranks, and where they lie."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.searched.chain_graph import Chain, ChainGraph, TimedStage, chain_graph


def random_graph(seed: int, *, most_units: int = 8) -> ChainGraph:
    """Encoder chains, each of a unit, and a trunk chain of each unit that reads some of them; some without backward."""
    random = np.random.default_rng(seed)
    ranks, units = int(random.integers(1, 5)), int(random.integers(1, most_units + 1))
    chunks, trains = int(random.integers(1, 4)), bool(random.random() < 0.8)
    chains: list[Chain] = []
    for unit in range(units):
        read = []
        for _ in range(int(random.integers(0, 4))):
            read.append(len(chains))
            first = int(random.integers(ranks))
            own = [stage(random, (first + place) % ranks, trains=trains) for place in range(ranks * chunks)]
            chains.append(Chain(unit, 0, tuple(own[: int(random.integers(1, len(own) + 1))])))
        if len(chains) > len(read) and random.random() < 0.2:  # what an earlier unit reads, too
            read.append(int(random.integers(len(chains) - len(read))))
            read = [each for each in read if chains[each].role == 0]
        own = [stage(random, place) for place in range(ranks)]
        chains.append(Chain(unit, 1, tuple(own), tuple(sorted(set(read)))))
    return chain_graph(chains)


def stage(random: np.random.Generator, rank: int, *, trains: bool = True) -> TimedStage:
    forward = float(random.integers(1, 20))
    return TimedStage(rank, forward, 2 * forward * trains, float(random.integers(0, 9)), rank)


def most_kept(graph: ChainGraph, order: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """``[stores]`` the most that each holds in an order; what is computed again counts while its backward runs."""
    held, most = np.zeros(len(graph.most_room)), np.zeros(len(graph.most_room))
    for work in order.tolist():
        store, forward = graph.stores[work], graph.forward_of[work]
        if forward < 0 and not recomputed[work]:
            held[store] += graph.room[work]
        again = graph.room[forward] if forward >= 0 and recomputed[forward] else 0.0
        most[store] = max(most[store], held[store] + again)
        if forward >= 0 and not recomputed[forward]:
            held[store] -= graph.room[forward]
    return most
