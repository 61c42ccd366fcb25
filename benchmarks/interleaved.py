"""An interleaved pipeline played chunk by chunk, beside the closed form: ``python -m benchmarks.interleaved``.

Megatron-LM's order (Narayanan et al., arXiv 2104.04473, section 2.2, as in ``get_schedule_table`` of its
``megatron/core/pipeline_parallel/schedules.py``). It shows what of the error of Optimus's "Megatron-LM balanced" is due
to chunks of unequal work and to sending between them, and what ranks wait for, beside the shares that its paper prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import published_figures as figures
from benchmarks.published import optimus_module, optimus_systems, timed
from benchmarks.report import table
from flowtrain_lightning.allocator import BACKBONE, ENCODER, Layout
from flowtrain_lightning.allocator.flops import FloatArray, IntArray

STAGES = 8
CHUNKS = (1, 2, 3, 6, 12)


@dataclass(frozen=True)
class Work:
    """One chunk of layers on one microbatch: forward (or backward) of the ``chunk``-th of a stage's chunks."""

    forward: bool
    chunk: int
    microbatch: int


def order(stage: int, stages: int, chunks: int, microbatches: int) -> list[Work]:
    """What a stage does, in order: forwards to warm up, then one forward and one backward in turn, then backwards."""
    count, group = microbatches * chunks, stages * chunks

    def work(number: int, forward: bool) -> Work:
        chunk = number % group // stages
        return Work(forward, chunk if forward else chunks - 1 - chunk, number // group * stages + number % stages)

    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(ahead, count)
    found = [work(number, True) for number in range(ahead)]
    for number in range(count - ahead):
        found += [work(number + ahead, True), work(number, False)]
    return found + [work(number, False) for number in range(count - ahead, count)]


def played(forward: Sequence[float], backward: Sequence[float], stages: int, microbatches: int, hop: float) -> float:
    """Seconds until all work is done.

    Args:
        forward: ``[chunks · stages]`` seconds of each chunk, in the order of the layers.
        backward: ``[chunks · stages]`` seconds of the backward of each chunk, in the order of the layers.
        stages: of the pipeline.
        microbatches: a multiple of ``stages`` where there are several chunks.
        hop: seconds of sending from one chunk to the next.
    """
    chunks = len(forward) // stages
    left = [order(stage, stages, chunks, microbatches)[::-1] for stage in range(stages)]
    free, done = [0.0] * stages, dict[tuple[bool, int, int], float]()
    while any(left):
        for stage, works in enumerate(left):
            while works:
                work = works[-1]
                place = work.chunk * stages + stage
                before = _before(work, place, len(forward))
                if before is not None and before not in done:
                    break
                ready = 0.0 if before is None else done[before] + hop * (before[1] != place)
                seconds = forward[place] if work.forward else backward[place]
                free[stage] = max(free[stage], ready) + seconds
                done[work.forward, place, work.microbatch] = free[stage]
                works.pop()
    return max(free)


def _before(work: Work, place: int, places: int) -> tuple[bool, int, int] | None:
    """What must be done before: the chunk before it, or for a backward the one after it."""
    if work.forward:
        return (True, place - 1, work.microbatch) if place else None
    return (True, place, work.microbatch) if place == places - 1 else (False, place + 1, work.microbatch)


def even_cuts(layers: FloatArray, parts: int) -> IntArray:
    """``[parts + 1]`` where to cut layers of so many seconds, none divided, so that parts differ least (squares)."""
    before = np.concatenate([[0.0], np.cumsum(layers)])
    count = len(layers)
    least, cut = np.full((parts + 1, count + 1), np.inf), np.zeros((parts + 1, count + 1), dtype=np.int64)
    least[0, 0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            sums = least[part - 1, :end] + (before[end] - before[:end]) ** 2
            # Of equal ones the first, whatever rounding says: layers are alike, so there are many.
            cut[part, end] = np.flatnonzero(sums <= sums.min() * (1 + 1e-9))[0]
            least[part, end] = sums.min()
    ends = [count]
    for part in range(parts, 0, -1):
        ends.append(int(cut[part, ends[-1]]))
    return np.array(ends[::-1])


def optimus_played(gpus: int, chunks: int, hop: float) -> float:
    """Seconds of a step of Optimus's "Megatron-LM balanced", with its 48 and 96 layers cut into whole ones."""
    module, layout = optimus_module(gpus), Layout(gpus // 64, 8, STAGES, shard="zero1")
    forward, backward, ends = list[float](), list[float](), 0.0
    for role, half in ((ENCODER, figures.VIT_22B), (BACKBONE, figures.GPT_175B)):
        time = timed(module[role], layout, "full")
        each = STAGES / float(time.microbatches[0]) / half.depth
        computing = float((time.forward + time.backward)[0])
        scale = float((time.forward + time.backward + time.exchange)[0]) / computing
        forward += [float(time.forward[0]) * scale * each] * half.depth
        backward += [float(time.backward[0]) * scale * each] * half.depth
        ends += float(time.at_the_end[0])
        microbatches = int(time.microbatches[0])
    cuts = even_cuts(np.add(forward, backward), STAGES * chunks)[:-1]
    there, back = (np.add.reduceat(seconds, cuts) for seconds in (forward, backward))
    return played(there.tolist(), back.tolist(), STAGES, microbatches, hop) + ends


def report() -> str:
    """Printed, closed form and played, and what a microbatch adds to a step."""
    lines = []
    for gpus, printed in figures.OPTIMUS["Megatron-LM balanced"].items():
        closed = optimus_systems(gpus)["Megatron-LM balanced"]
        several = [f"{optimus_played(gpus, chunks, 4e-4):.2f}" for chunks in CHUNKS]
        lines.append((str(gpus), f"{printed:.2f}", f"{closed:.2f}", *several))
    head = ("GPUs", "printed s", "closed form", *(f"played, {chunks} chunks" for chunks in CHUNKS))
    steps = figures.OPTIMUS
    added = [
        (name, *(f"{(seconds[1536] - seconds[3072]) / 16:.3f}" for seconds in (steps[name], _predicted(name))))
        for name in steps
    ]
    idle = [
        (what, f"{100 * figures.OPTIMUS_IDLE[what]:.1f} %", f"{100 * share:.1f} %")
        for what, share in optimus_idle().items()
    ]
    return "\n".join(
        [
            table(head, lines),
            table(("seconds that a microbatch adds", "printed", "predicted"), added),
            table(("share of a step that GPUs wait", "printed", "predicted"), idle),
        ]
    )


def optimus_idle(gpus: int = 3072, chunks: int = 12) -> dict[str, float]:
    """What ranks wait for -> share of a step of "Megatron-LM balanced", in the closed form."""
    module, layout = optimus_module(gpus), Layout(gpus // 64, 8, STAGES, shard="zero1")
    language, picture = (timed(module[role], layout, "full") for role in (BACKBONE, ENCODER))
    seconds = {
        "among data ranks": language.reduction + picture.reduction,
        "among tensor ranks": language.exchange + picture.exchange,
        "filling and draining": (language.bubble + picture.bubble) / chunks,
        "inside the pipeline": timed(module[BACKBONE], layout, "full", chunks).exchange - language.exchange,
    }
    step = optimus_systems(gpus)["Megatron-LM balanced"]
    return {what: float(each[0]) / step for what, each in seconds.items()}


def _predicted(system: str) -> dict[int, float]:
    return {gpus: optimus_systems(gpus)[system] for gpus in (1536, 3072)}


def main() -> None:
    """Print the report."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(report())


if __name__ == "__main__":
    main()
