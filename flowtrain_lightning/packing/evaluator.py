"""How long steps take if nothing but computing takes time: the lanes' own rules, played with a list of events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.plan import IntArray, StepPlan
from flowtrain_lightning.packing.playing import Play, Stretch

FORWARD_SHARE = 1 / 3
"""The forward's share of what an encoder batch costs when the encoder trains: a backward is two forwards."""


@dataclass(frozen=True)
class EncoderWork:
    """One encoder batch.

    Attributes:
        forward: time of its forward.
        backward: time of its backward; 0 where the encoder does not train.
        readers: ``(backbone rank, position)`` of the microbatches that read it.
        recomputed: nothing is kept of its forward, which runs again before its backward.
    """

    forward: float
    backward: float
    readers: tuple[tuple[int, int], ...]
    recomputed: bool = False

    @property
    def is_kept(self) -> bool:
        """Its activations are kept from its forward to its backward."""
        return self.backward > 0 and not self.recomputed


@dataclass(frozen=True)
class StepWork:
    """What there is to compute in one step.

    Attributes:
        microbatches: ``[backbone rank][position]`` time of forward and backward together.
        encoder_batches: ``[encoder rank][number]``, none without media.
    """

    microbatches: Sequence[Sequence[float]]
    encoder_batches: Sequence[Sequence[EncoderWork]]


@dataclass(frozen=True)
class Lanes:
    """Who computes, and by which rules.

    Attributes:
        backbone: the rank that each backbone lane runs on.
        encoder: the rank that each encoder lane runs on. A rank in both does one thing at a time, the backbone's first.
        meet: backbone lanes begin each microbatch together.
        kept: encoder batches per lane whose activations may be kept at a time; None sets no limit.
        encoder_first: no microbatch begins before all encoder forwards of the step are done.
        ahead: later steps that ranks which only encode may have begun; 0 where the encoder trains.
    """

    backbone: tuple[int, ...]
    encoder: tuple[int, ...]
    meet: bool
    kept: int | None = None
    encoder_first: bool = False
    ahead: int = 0

    @classmethod
    def of(cls, work: StepWork, *, meet: bool, kept: int | None = None, colocated: bool = False) -> Lanes:
        """Lanes on ranks of their own, or encoder lane ``r`` on the rank of backbone lane ``r``."""
        backbone, encoder = len(work.microbatches), len(work.encoder_batches)
        first = 0 if colocated else backbone
        return cls(tuple(range(backbone)), tuple(range(first, first + encoder)), meet, kept)


@dataclass(frozen=True)
class StepTime:
    """What a step takes.

    Attributes:
        makespan: time from its begin until the last lane is done.
        work: time that the busiest lane computes; with both lanes on one rank, that the busiest rank computes.
    """

    makespan: float
    work: float

    @property
    def flow_gap(self) -> float:
        """By how much the step is longer than the work of its busiest lane, as a share of that work."""
        return self.makespan / self.work - 1 if self.work else 0.0


def step_time(
    microbatches: Sequence[Sequence[float]],
    encoder_batches: Sequence[Sequence[EncoderWork]],
    *,
    meet: bool,
    kept: int | None = None,
    colocated: bool = False,
) -> StepTime:
    """Simulate one step that all ranks begin at the same time; see :class:`StepWork` and :class:`Lanes`.

    Raises:
        ValueError: no lane can go on, for instance since ``kept`` is too small for this order.
    """
    work = StepWork(microbatches, encoder_batches)
    lanes = Lanes.of(work, meet=meet, kept=kept, colocated=colocated)
    ended = Play(work, lanes, dict.fromkeys({*lanes.backbone, *lanes.encoder}, 0.0)).run()
    busy = dict.fromkeys(ended, 0.0)
    for rank, times in zip(lanes.backbone, microbatches, strict=True):
        busy[rank] += sum(times)
    for rank, batches in zip(lanes.encoder, encoder_batches, strict=True):
        busy[rank] += sum(batch.forward + batch.backward for batch in batches)
    return StepTime(max(ended.values(), default=0.0), max(busy.values(), default=0.0))


def run_time(steps: Sequence[StepWork], lanes: Lanes, stretches: list[Stretch] | None = None) -> list[float]:
    """When the backbone has ended each of some consecutive steps, from the beginning of the first.

    Backbone ranks begin a step when all of them have ended the one before; encoder ranks when all ranks have, or, if
    they only encode and may work ahead, when they are done themselves.

    Args:
        steps: what there is to compute.
        lanes: who computes.
        stretches: gets everything that is computed, if given.

    Raises:
        ValueError: no lane can go on.
    """
    free = dict.fromkeys({*lanes.backbone, *lanes.encoder}, 0.0)
    backbone_ends: list[float] = []
    only_encode = set(lanes.encoder) - set(lanes.backbone)
    for number, work in enumerate(steps):
        play = Play(work, lanes, free)
        ended = play.run()
        if stretches is not None:
            stretches += [replace(stretch, step=number) for stretch in play.stretches]
        backbone_ends.append(max((ended[rank] for rank in lanes.backbone), default=0.0))
        everyone = max(ended.values(), default=0.0)
        for rank in free:
            if rank in only_encode and lanes.ahead:
                begun = number + 1 - lanes.ahead
                free[rank] = max(ended[rank], backbone_ends[begun - 1] if begun > 0 else 0.0)
            else:
                free[rank] = everyone if rank in lanes.encoder else backbone_ends[-1]
    return backbone_ends


def plan_work(
    plan: StepPlan,
    microbatch: Callable[[IntArray], float],
    encoder_batch: Callable[[IntArray], tuple[float, float]],
    recomputed: Sequence[Collection[int]] | None = None,
) -> StepWork:
    """What a plan has its lanes compute.

    Args:
        plan: who encodes and who reads what.
        microbatch: time of forward and backward together, by the tokens of its sequences.
        encoder_batch: time of forward and of backward, by the patches of its media.
        recomputed: for each encoder rank the numbers of the batches of which nothing is kept; None for none.
    """
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for entry in plan.entries:
        readers.setdefault((entry.encoder_rank, entry.encoder_batch), []).append(
            (entry.backbone_rank, entry.microbatch)
        )
    sizes = plan.sizes
    encoding = []
    for rank, batches in enumerate(plan.encoder_batches):
        computed_again = recomputed[rank] if recomputed is not None else ()
        encoding.append(
            [
                EncoderWork(
                    *encoder_batch(sizes.media_patches[media]), tuple(readers[rank, number]), number in computed_again
                )
                for number, media in enumerate(batches)
                if len(media)
            ]
        )
    reading = [[microbatch(sizes.tokens[m]) if len(m) else 0.0 for m in rank] for rank in plan.microbatches]
    return StepWork(reading, encoding)


def plan_time(
    plan: StepPlan,
    cost: CostModel,
    encoder_cost: CostModel,
    *,
    meet: bool,
    trains: bool = True,
    kept: int | None = None,
    colocated: bool = False,
) -> StepTime:
    """Simulate a step plan.

    Args:
        plan: who encodes and who reads what.
        cost: forward and backward of a microbatch.
        encoder_cost: forward and backward of an encoder batch, by its media's patches.
        meet: backbone ranks begin each microbatch together.
        trains: the encoder has a backward; without one its forward is a third of ``encoder_cost``.
        kept: see :class:`Lanes`.
        colocated: encoder rank ``r`` is backbone rank ``r``.
    """

    def encoder_batch(patches: IntArray) -> tuple[float, float]:
        total = encoder_cost.of_set(patches)
        return total * FORWARD_SHARE, total * (1 - FORWARD_SHARE) if trains else 0.0

    work = plan_work(plan, cost.of_set, encoder_batch)
    return step_time(work.microbatches, work.encoder_batches, meet=meet, kept=kept, colocated=colocated)
