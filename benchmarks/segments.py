"""DIP's ladder (2504.14145, table 5): segments of ViT and LM on the same ranks, with an order that is searched.

python benchmarks/segments.py            five seeds, and orders under wrong costs on 200 graphs: two idle minutes
python benchmarks/segments.py --quick    one seed and 20 graphs, to see that it runs

Nothing is trained: costs follow from the layer times that DIP prints (ViT 5B and Llama3 8B on 4 pipeline ranks of 4
GPUs each), and steps are played. So only ratios count. Every line computes all activations again, as DIP's do before it
chooses what to keep; the last one chooses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.launch import machine
from benchmarks.memory_choice import Layer, choices_of
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.packing.play import play
from flowtrain_lightning.packing.policies.trunk_order import in_order
from flowtrain_lightning.packing.searched.chain_graph import Chain, ChainGraph, TimedStage, chain_graph
from flowtrain_lightning.packing.searched.memory_choice import chosen_memory, with_choices
from flowtrain_lightning.packing.searched.searched_order import (
    Limits,
    ListedOrder,
    by_priority,
    greedy_order,
    searched_order,
)
from flowtrain_lightning.packing.step_graph import BatchOf, StepGraph, Work
from flowtrain_lightning.packing.step_plan import FloatArray

ROOT = Path(__file__).parents[1]
RANKS, TENSOR, MICROBATCHES, MOST_IMAGES = 4, 4, 24, 48
VIT_LAYERS, LM_LAYERS, TOKENS, PATCHES = 63, 32, 8192, 2704
VIT_WIDTH, VIT_FFN, LM_WIDTH, LM_FFN, LM_KV, VOCABULARY = 1792, 15360, 4096, 14336, 1024, 128256
VIT_WEIGHTS = 4 * VIT_WIDTH**2 + 2 * VIT_WIDTH * VIT_FFN
LM_WEIGHTS = 2 * LM_WIDTH * (LM_WIDTH + LM_KV) + 3 * LM_WIDTH * LM_FFN
VIT_RATE, LM_RATE = 187e12, 310e12
"""FLOP/s of a GPU that the printed times of a layer come to."""
SUB_MICROBATCH, CHUNKS = 12, 3
"""Images of a sub-microbatch, and runs of ViT layers on each rank: DIP's own."""
GPU_BYTES, CONTEXT_BYTES, LINK = 0.9 * 80e9, 5e9, 50e9
"""Of an H800, a tenth of which is lost to fragments; what CUDA and NCCL take of it; bytes a second to host memory."""
PRINTED = {"1F1B": 26.13, "static": 22.27, "greedy": 18.81, "searched": 17.61, "memory": 16.05}
WRONG = 0.1


def vit_seconds(images: float) -> float:
    """Forward of one ViT layer on a rank."""
    return images * PATCHES * (2 * VIT_WEIGHTS + 4 * PATCHES * VIT_WIDTH) / (TENSOR * VIT_RATE)


LM_SECONDS = TOKENS * (2 * LM_WEIGHTS + 2 * TOKENS * LM_WIDTH) / (TENSOR * LM_RATE)
HEAD_SECONDS = TOKENS * 2 * LM_WIDTH * VOCABULARY / (TENSOR * LM_RATE)
VIT_BYTES = PATCHES * (2 * VIT_WIDTH * 8 + 4 * VIT_FFN) / TENSOR
"""Activations of an image in a layer on one of the GPUs, all of them; in bfloat16, with sequence parallelism."""
LM_BYTES = TOKENS * (2 * (LM_WIDTH * 6 + 2 * LM_KV) + 6 * LM_FFN) / TENSOR
LOGIT_BYTES = 6 * TOKENS * VOCABULARY / TENSOR
STATE_BYTES = 18 * (VIT_LAYERS * VIT_WEIGHTS + LM_LAYERS * LM_WEIGHTS + 2 * LM_WIDTH * VOCABULARY) / (TENSOR * RANKS)


class Costs(NamedTuple):
    """What a run of layers takes.

    Attributes:
        forward: seconds.
        head: of it, what is never computed again.
        entry: bytes that come in, from which the rest is computed again.
    """

    forward: float
    head: float = 0.0
    entry: float = 0.0

    def stage(self, rank: int, *, again: bool) -> TimedStage:
        backward = 2 * self.forward + (self.forward - self.head) * again
        return TimedStage(rank, self.forward, backward, max(self.entry, 1.0), rank)


class Step(NamedTuple):
    """Segments of a step in which all is computed again, and the layers of each work.

    Attributes:
        graph: of the step.
        keeps: the same with backwards that compute nothing again.
        layers: ``[works]`` one of each stage's layers, and how many it has.
    """

    graph: ChainGraph
    keeps: ChainGraph
    layers: list[tuple[Layer, float]]


def divided(images: int) -> list[int]:
    """Images of each sub-microbatch, alike."""
    count = -(-images // SUB_MICROBATCH)
    return np.diff(np.linspace(0, images, count + 1).round()).astype(int).tolist() if count else []


def vit_layer(images: float) -> Layer:
    room, forward = images * VIT_BYTES, vit_seconds(images)
    moving = max(0.0, room / LINK - forward) + max(0.0, room / LINK - 2 * forward)
    return Layer(forward, room, images * PATCHES * 2 * VIT_WIDTH / TENSOR, moving)


def lm_layer() -> Layer:
    moving = max(0.0, LM_BYTES / LINK - LM_SECONDS) + max(0.0, LM_BYTES / LINK - 2 * LM_SECONDS)
    return Layer(LM_SECONDS, LM_BYTES, TOKENS * 2 * LM_WIDTH / TENSOR, moving)


def segments(images: Sequence[int], ranks: int = RANKS, chunks: int = CHUNKS) -> Step:
    """ViT layers in ``ranks * chunks`` runs for sub-microbatches, LM layers in one a rank."""
    chains: dict[bool, list[Chain]] = {True: [], False: []}
    layers: list[tuple[Layer, float]] = []
    runs, lm = ranks * chunks, LM_LAYERS // ranks

    def add(
        unit: int, role: int, costs: Sequence[Costs], layer: tuple[Layer, float], reads: tuple[int, ...] = ()
    ) -> int:
        for again, own in chains.items():
            parts = tuple(each.stage(place % ranks, again=again) for place, each in enumerate(costs))
            own.append(Chain(unit, role, parts, reads))
        layers.append(layer)
        return len(layers) - 1

    for unit, count in enumerate(images):
        read = []
        for part in divided(count):
            layer, each = vit_layer(part), VIT_LAYERS / runs
            costs = [Costs(each * layer.forward, 0.0, each * layer.entry)] * runs
            read.append(add(unit, 0, costs, (layer, each), ()))
        layer = lm_layer()
        costs = [Costs(lm * LM_SECONDS, 0.0, lm * layer.entry)] * (ranks - 1)
        costs.append(Costs(lm * LM_SECONDS + HEAD_SECONDS, HEAD_SECONDS, lm * layer.entry))
        add(unit, 1, costs, (layer, lm), tuple(read))
    graph = chain_graph(chains[True])
    return Step(graph, chain_graph(chains[False]), [layers[chain] for chain in graph.chains])


def one_f_one_b(images: Sequence[int]) -> float:
    """Seconds with all layers in one pipeline, cut where mean microbatches make its stages alike: Megatron's 1F1B."""
    mean = float(np.mean(images))
    per_layer = np.array([vit_seconds(mean)] * VIT_LAYERS + [LM_SECONDS] * LM_LAYERS)
    per_layer[-1] += HEAD_SECONDS
    sums = np.concatenate([[0.0], np.cumsum(per_layer)])
    cuts = min(
        combinations(range(4, len(per_layer)), RANKS - 1),
        key=lambda inner: np.diff(sums[[0, *inner, len(per_layer)]]).max(),
    )
    bounds = [0, *cuts, len(per_layer)]
    chains = []
    for unit, count in enumerate(images):
        parts = []
        for rank, (first, last) in enumerate(pairwise(bounds)):
            vit = max(0, min(last, VIT_LAYERS) - first)
            head = HEAD_SECONDS if rank == RANKS - 1 else 0.0
            forward = max(vit * vit_seconds(count) + (last - first - vit) * LM_SECONDS + head, 1e-9)
            parts.append(Costs(forward, head).stage(rank, again=True))
        chains.append(Chain(unit, 0, tuple(parts)))
    graph = chain_graph(chains)
    number = {(graph.ranks[w], bool(graph.is_backward[w]), graph.units[w]): w for w in range(len(graph))}
    lanes = {
        rank: [[number[rank, kind == "backward", place] for kind, place in in_order(len(images), every, RANKS - rank)]]
        for rank in range(RANKS)
        for every in [range(len(images))]
    }
    works = [Work(BatchOf("all", 0, int(unit)), "forward") for unit in graph.units]
    played = play(StepGraph(works, graph.needs, lanes), graph.seconds.tolist(), dict.fromkeys(range(RANKS), 0.0))
    return max(played.free.values())


def static_order(step: Step, images: Sequence[int], ranks: int = RANKS, chunks: int = CHUNKS) -> ListedOrder:
    """The order of a step of mean microbatches, followed with the real ones: made once, as 1F1B is."""
    mean = segments([round(float(np.mean(images)))] * len(images), ranks, chunks).graph
    begins = np.empty(len(mean))
    begins[greedy_order(mean, unlimited(mean)).order] = np.arange(len(mean))

    def place(graph: ChainGraph, work: int) -> tuple[int, int, int, bool]:
        return int(graph.units[work]), int(graph.roles[work]), int(graph.depths[work]), bool(graph.is_backward[work])

    known: dict[tuple[int, int, int, bool], float] = {}
    for work in range(len(mean)):
        known[place(mean, work)] = min(begins[work], known.get(place(mean, work), np.inf))
    keys = [(known[place(step.graph, work)], int(step.graph.chains[work])) for work in range(len(step.graph))]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    listed = ListedOrder(order, np.zeros(len(order), dtype=np.bool_), 0.0)
    return ListedOrder(order, listed.recomputed, listed.takes(step.graph))


def unlimited(graph: ChainGraph) -> Limits:
    return Limits.of(graph, np.full(len(graph.most_room), np.inf))


def separate(images: Sequence[int], encoders: int) -> float:
    """Seconds with so many of the 16 GPUs encoding alone, and the LM over all others (tensor)."""
    left, work, chains = TENSOR * RANKS - encoders, np.zeros(encoders), list[Chain]()
    for unit, count in enumerate(images):
        read = []
        for part in np.array_split(np.arange(count), -(-count // 3)) if count else []:
            rank, forward = int(work.argmin()), VIT_LAYERS * vit_seconds(len(part)) * TENSOR
            work[rank] += forward
            read.append(len(chains))
            chains.append(Chain(unit, 0, (Costs(forward).stage(rank, again=True),)))
        forward = (LM_LAYERS * LM_SECONDS + HEAD_SECONDS) * TENSOR / left
        head = HEAD_SECONDS * TENSOR / left
        chains.append(Chain(unit, 1, (Costs(forward, head).stage(encoders, again=True),), tuple(read)))
    graph = chain_graph(chains)
    return greedy_order(graph, unlimited(graph)).seconds


def colocated(images: Sequence[int]) -> float:
    """Seconds with a sequence on every GPU at a time (FSDP2), images dealt to all; gathers are not counted."""
    rounds = -(-len(images) // (TENSOR * RANKS))
    vit = VIT_LAYERS * vit_seconds(sum(images)) / RANKS
    return 4 * (vit + rounds * LM_LAYERS * LM_SECONDS * TENSOR) + 3 * rounds * HEAD_SECONDS * TENSOR


def ladder(seed: int) -> dict[str, Any]:
    """Seconds of every line, and CPU seconds of what is searched and chosen."""
    images = np.random.default_rng(seed).integers(0, MOST_IMAGES + 1, MICROBATCHES).tolist()
    step = segments(images)
    state = STATE_BYTES + LOGIT_BYTES
    room = GPU_BYTES - CONTEXT_BYTES - state - max(vit_layer(SUB_MICROBATCH).room, LM_BYTES)
    limits = Limits.of(step.graph, np.full(RANKS, room))
    found = searched_order(step.graph, limits)
    begun = time.process_time()
    found = searched_order(step.graph, limits)
    searching = time.process_time() - begun
    choices = choices_of(step.graph, step.layers, steps=2)
    begun = time.process_time()
    kept = with_choices(step.keeps, choices, chosen_memory(step.graph, found.order, choices, limits.kept))
    choosing = time.process_time() - begun
    again = by_priority(kept, limits, np.argsort(found.order).astype(np.float64))
    chosen = searched_order(kept, limits, [again])
    return {
        "1F1B": one_f_one_b(images),
        "static": static_order(step, images).seconds,
        "greedy": greedy_order(step.graph, limits).seconds,
        "searched": found.seconds,
        "memory": chosen.seconds,
        "separate": min(separate(images, encoders) for encoders in (8, 10, 12, 14)),
        "colocated": colocated(images),
        "busy": float(np.bincount(step.graph.ranks, step.graph.seconds).max()),
        "works": len(step.graph),
        "searching": searching,
        "choosing": choosing,
    }


def under_wrong_costs(graphs: int) -> FloatArray:
    """``[graphs]`` seconds of the searched order / of the static one, both made from costs that are off by a tenth."""
    found = []
    for seed in range(graphs):
        random = np.random.default_rng(1000 + seed)
        ranks, count = int(random.integers(2, 5)), int(random.integers(6, 25))
        images = random.integers(0, MOST_IMAGES + 1, count).tolist()
        chunks = int(random.integers(1, 4))
        step = segments(images, ranks, chunks)
        static = static_order(step, images, ranks, chunks)
        searched = searched_order(step.graph, unlimited(step.graph))
        real = with_errors(step.graph, random)
        found.append(searched.takes(real) / static.takes(real))
    return np.array(found)


def with_errors(graph: ChainGraph, random: np.random.Generator) -> ChainGraph:
    """The graph with seconds that are off by a tenth, each by its own draw."""
    return replace(graph, seconds=graph.seconds * np.clip(1 + WRONG * random.standard_normal(len(graph)), 0.5, 1.5))


LINES = {
    "1F1B": "1F1B, all layers in one pipeline, cut for mean microbatches",
    "static": "segments, the order of mean microbatches",
    "greedy": "segments, greedy order of arrival",
    "searched": "segments, searched order",
    "memory": "the same, and what to keep chosen for every stage",
    "separate": "separate: 8 to 14 of 16 GPUs encode, the best of these",
    "colocated": "colocated FSDP2, images dealt to all GPUs",
}


def report(steps: Sequence[dict[str, Any]], ratios: FloatArray, about: dict[str, str]) -> str:
    """The table, and what the searches took."""
    mean = {name: statistics.mean(step[name] for step in steps) for name in steps[0]}
    rows = []
    for name, text in LINES.items():
        ratio, bubble = mean[name] / mean["1F1B"], 1 - mean["busy"] / mean[name]
        printed = PRINTED[name] / PRINTED["1F1B"] if name in PRINTED else None
        beside = (
            ["", "", ""] if printed is None else [f"{PRINTED[name]}", f"{printed:.3f}", f"{ratio / printed - 1:+.1%}"]
        )
        idle = f"{bubble:.2f}" if name in ("1F1B", "static", "greedy", "searched") else ""
        rows.append([text, f"{mean[name]:.2f}", idle, f"{ratio:.3f}", *beside])
    head = ["", "seconds", "idle", "/ first", "DIP, seconds", "DIP, / first", "ratio beside DIP's"]
    return (
        f"Means of {len(steps)} steps of {MICROBATCHES} sequences of {TOKENS:,} tokens with 0 to {MOST_IMAGES} images: "
        "ViT 5B and Llama3 8B on 16 H800. Steps are played with layer times that DIP prints; nothing is trained, and "
        "only ratios count. All lines but the fifth compute all activations again.\n\n"
        + table(head, rows)
        + f"\n- The search plays a fixed number of orders: {mean['searching']:.2f} s of CPU time for "
        f"{mean['works']:.0f} works. Choosing what to keep: {mean['choosing']:.2f} s.\n"
        f"- Made from costs that are off by {WRONG:.0%} for each work, on {len(ratios)} random graphs: the searched "
        f"order is faster than the static one on {(ratios < 1).mean():.0%}, takes {np.median(ratios):.3f} of its time "
        f"in the median and {ratios.max():.3f} at most.\n\n" + machine_line(about) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and 20 graphs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    about = machine()
    steps = [ladder(seed) for seed in range(1 if options.quick else 5)]
    ratios = under_wrong_costs(20 if options.quick else 200)
    text = report(steps, ratios, about)
    print(text)
    results = {"machine": about, "steps": steps, "under wrong costs": ratios.tolist()}
    write_results(options.out, "segments", results, text)


if __name__ == "__main__":
    main()
