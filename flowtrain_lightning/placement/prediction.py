"""How long a step takes on an allocation: the run's own first steps, packed and played with measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER, ROLES
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.simulator import recomputed_batches, simulate_steps
from flowtrain_lightning.packing.step_work import Lanes, StepWork, step_work
from flowtrain_lightning.profiling import Profile, Reduction
from flowtrain_lightning.runtime.encoder_lane import STEPS_AHEAD


@dataclass(frozen=True)
class Processors:
    """Which ranks share what they compute on.

    Attributes:
        sharing: ranks that share something, such as the ranks of one device or all ranks of one CPU.
        capacity: how many of these ranks it serves at full speed.
    """

    sharing: tuple[tuple[int, ...], ...]
    capacity: float


@dataclass(frozen=True)
class Prediction:
    """What steps take on an allocation.

    Attributes:
        allocation: which ranks do what.
        seconds: of a step.
        samples_per_second: over all ranks.
        idle: role -> the part of a step in which its ranks have nothing to compute.
    """

    allocation: Allocation
    seconds: float
    samples_per_second: float
    idle: dict[str, float]


def predict(
    plans: Sequence[StepPlan], allocation: Allocation, profile: Profile, processors: Processors, kept_batches: int
) -> Prediction:
    """Play steps on an allocation.

    Moving features, loading and Lightning's own work take no time here; no placement has less of them.

    Args:
        plans: consecutive steps, planned for the allocation.
        allocation: replicated roles, separate or colocated.
        profile: what everything costs.
        processors: which of the ranks share what they compute on.
        kept_batches: encoder batches whose activations each encoder rank keeps.
    """
    works, lanes = to_play(plans, allocation, profile, kept_batches)
    # Round once more to the first step, for what a step takes from one backbone's end to the next.
    backbone_ends = simulate_steps([*works, works[0]], lanes).backbone_ends
    played = (backbone_ends[-1] - backbone_ends[0]) / len(works)
    busy = _busy_seconds(works, allocation)
    crowded = max(sum(sum(busy[rank].values()) for rank in ranks) / processors.capacity for ranks in processors.sharing)
    seconds = max(played, crowded)
    samples = float(np.mean([len(plan.samples) for plan in plans]))
    return Prediction(allocation, seconds, samples / seconds, _idle(busy, allocation, seconds))


def to_play(
    plans: Sequence[StepPlan], allocation: Allocation, profile: Profile, kept_batches: int
) -> tuple[list[StepWork], Lanes]:
    """What the lanes compute in every step, and by which rules they do.

    The end of a step is one more microbatch of every backbone lane, and a part of the backward of every encoder lane's
    last batch.
    """
    ends = {role: sum(end_seconds(profile, role, len(allocation.ranks[role]))) for role in ROLES}
    lanes = Lanes(
        allocation.ranks[BACKBONE],
        allocation.ranks[ENCODER],
        sync_every="step",
        kept_batches=kept_batches,
        steps_ahead=0 if profile.roles[ENCODER].trains else STEPS_AHEAD,
    )
    return [_work(plan, profile, kept_batches, ends) for plan in plans], lanes


def reduction_seconds(reduction: Reduction | None, size: int, ranks: int) -> float:
    """Seconds in which ``ranks`` sum ``size`` bytes each, if the measured ranks did it as a ring does."""
    if reduction is None or ranks < 2:
        return 0.0
    hops = (ranks - 1) / (reduction.ranks - 1)
    moved = hops * reduction.ranks / ranks
    return replace(
        reduction, constant=reduction.constant * hops, seconds_per_byte=reduction.seconds_per_byte * moved
    ).seconds(size)


def end_seconds(profile: Profile, role: str, ranks: int) -> tuple[float, float]:
    """What a rank does for a role at the end of a step: seconds of the reduction, and of the optimizer."""
    half = profile.roles[role]
    return reduction_seconds(profile.reduction, half.gradient_bytes, ranks), half.optimizer_seconds


def _work(plan: StepPlan, profile: Profile, kept_batches: int, ends: dict[str, float]) -> StepWork:
    encoder = profile.roles[ENCODER]

    def encoder_batch(patches: IntArray) -> tuple[float, float]:
        seconds = encoder.cost.of_set(patches)
        forward = seconds * encoder.forward_share if encoder.trains else seconds
        return forward, seconds - forward

    work = step_work(
        plan,
        profile.cost.of_set,
        encoder_batch,
        recomputed_batches(plan, kept_batches) if encoder.trains else None,
    )
    encoding = [
        [*batches[:-1], *(replace(last, backward=last.backward + ends[ENCODER]) for last in batches[-1:])]
        for batches in work.encoder_batches
    ]
    return StepWork([[*of_rank, ends[BACKBONE]] for of_rank in work.microbatches], encoding)


def _busy_seconds(works: Sequence[StepWork], allocation: Allocation) -> dict[int, dict[str, float]]:
    """Rank -> role -> seconds that it computes for that role in a step, on average."""
    busy: dict[int, dict[str, float]] = {rank: {} for rank in sorted(set().union(*allocation.ranks.values()))}
    for role in ROLES:
        for lane, rank in enumerate(allocation.ranks[role]):
            busy[rank][role] = float(np.mean([_lane_seconds(work, role, lane) for work in works]))
    return busy


def _lane_seconds(work: StepWork, role: str, lane: int) -> float:
    if role == BACKBONE:
        return sum(work.microbatches[lane])
    return sum(batch.forward * (2 if batch.recomputed else 1) + batch.backward for batch in work.encoder_batches[lane])


def _idle(busy: dict[int, dict[str, float]], allocation: Allocation, seconds: float) -> dict[str, float]:
    """Role -> idle part of its ranks; a rank with two roles is idle where it computes for neither."""
    return {
        role: max(0.0, 1 - float(np.mean([sum(busy[rank].values()) for rank in allocation.ranks[role]])) / seconds)
        for role in ROLES
    }
