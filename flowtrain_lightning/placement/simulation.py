"""Steps on an allocation, played with measured costs: how long they take, and who does what meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER, ROLES
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.simulator import SimulatedSpan, simulate_steps
from flowtrain_lightning.placement.prediction import end_seconds, to_play
from flowtrain_lightning.profiling import Profile
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, Span

PURPOSES = ("forward", "backward", "reduction", "optimizer", "idle")
"""What a rank's time goes into. A forward that is computed again is part of the backward."""


@dataclass(frozen=True)
class Simulation:
    """Consecutive steps, after one that does not count since nothing comes before it.

    Attributes:
        allocation: which ranks do what.
        seconds: of every step, from the end of the backbone's step before to that of its own.
        samples: of a step, on average.
        tokens: of a step, on average.
        shares: role -> purpose -> the part of its ranks' time, from 0 to 1. A rank with two roles is idle where it
            computes for neither, so that the shares of both, with idle counted once, make 1.
        timelines: a dictionary of every rank, as `flowtrain_lightning.callbacks.timeline.draw_step` takes them.
    """

    allocation: Allocation
    seconds: list[float]
    samples: float
    tokens: float
    shares: dict[str, dict[str, float]]
    timelines: list[dict[str, Any]]

    @property
    def step_seconds(self) -> float:
        """Of a step, on average."""
        return float(np.mean(self.seconds))


def simulate(plans: Sequence[StepPlan], allocation: Allocation, profile: Profile, kept_batches: int) -> Simulation:
    """Play steps on an allocation by the rules of the runtime, every rank on a device of its own.

    Moving features, loading and Lightning's own work take no time here.

    Args:
        plans: consecutive steps, planned for the allocation. The first one is played twice.
        allocation: roles whose ranks hold whole copies.
        profile: what everything costs on one device.
        kept_batches: encoder batches whose activations each encoder rank keeps.

    Raises:
        AllocationError: the roles are not those of the profile, or have layouts other than whole copies.
    """
    _refuse_what_no_profile_tells(allocation)
    plans = [plans[0], *plans]
    works, lanes = to_play(plans, allocation, profile, kept_batches)
    simulated = simulate_steps(works, lanes)
    ends = simulated.backbone_ends
    spans = list(_spans(simulated.spans, plans, allocation, profile))
    counted = plans[1:]
    return Simulation(
        allocation=allocation,
        seconds=np.diff(ends).tolist(),
        samples=float(np.mean([len(plan.samples) for plan in counted])),
        tokens=float(np.mean([plan.sizes.tokens.sum() for plan in counted])),
        shares=_shares(spans, allocation, profile.roles[BACKBONE].forward_share, (ends[0], ends[-1])),
        timelines=_timelines(spans, allocation),
    )


def _refuse_what_no_profile_tells(allocation: Allocation) -> None:
    if set(allocation.layouts) != set(ROLES):
        raise AllocationError(
            f"A profile has the roles {' and '.join(ROLES)}, but the plan has {', '.join(allocation.layouts)}."
        )
    for role, layout in allocation.layouts.items():
        if layout != Layout(data=layout.data):
            raise AllocationError(
                f"The plan's {role} has {layout.describe()}, but a profile tells what a rank takes that holds a whole "
                "copy of its half; make the plan with `flowtrain plan --whole-copies`."
            )


def _spans(
    simulated: Sequence[SimulatedSpan], plans: Sequence[StepPlan], allocation: Allocation, profile: Profile
) -> Iterator[tuple[int, Span]]:
    """Rank and span, with the end of a step told apart from the microbatches and batches."""
    for one in simulated:
        role = BACKBONE if one.kind == "microbatch" else ENCODER
        plan, start = plans[one.step], one.start
        parts: list[tuple[str, str, float]] = [(one.kind, COMPUTE, one.end - one.start)]
        if _ends_a_step(one, plan):
            reduction, optimizer = end_seconds(profile, role, len(allocation.ranks[role]))
            own = max(0.0, parts[0][2] - reduction - optimizer)
            parts = [(parts[0][0], COMPUTE, own), ("reduction", COMMUNICATION, reduction)]
            parts.append(("optimizer", COMPUTE, optimizer))
        for name, kind, seconds in parts:
            if seconds > 0:
                place = (role, kind, name, "train", one.step, one.number)
                yield one.rank, Span(*place, start, start + seconds)
            start += seconds


def _ends_a_step(one: SimulatedSpan, plan: StepPlan) -> bool:
    if one.kind == "microbatch":
        return one.number == len(plan.microbatches[one.lane])
    worked = sum(len(media) > 0 for media in plan.encoder_batches[one.lane])
    return one.kind == "backward" and one.number == worked - 1


def _shares(
    spans: Sequence[tuple[int, Span]], allocation: Allocation, forward_share: float, window: tuple[float, float]
) -> dict[str, dict[str, float]]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
    for rank, span in spans:
        spent = max(0.0, min(span.end, window[1]) - max(span.start, window[0]))
        busy[rank] += spent
        if span.name == "microbatch":
            seconds[span.lane, "forward"] += spent * forward_share
            seconds[span.lane, "backward"] += spent * (1 - forward_share)
        else:
            seconds[span.lane, span.name] += spent
    shares = {}
    for role, ranks in allocation.ranks.items():
        whole = len(ranks) * (window[1] - window[0])
        idle = whole - sum(busy[rank] for rank in ranks)
        spent_on = {**{name: seconds[role, name] for name in PURPOSES}, "idle": max(0.0, idle)}
        shares[role] = {name: spent / whole for name, spent in spent_on.items()}
    return shares


def _timelines(spans: Sequence[tuple[int, Span]], allocation: Allocation) -> list[dict[str, Any]]:
    of_rank: dict[int, list[Span]] = defaultdict(list)
    for rank, span in spans:
        if span.name != "optimizer":  # no more than in a picture of a real run
            of_rank[rank].append(span)
    return [
        {"rank": rank, "label": " and ".join(_lanes_of(rank, allocation)), "spans": found}
        for rank, found in sorted(of_rank.items())
    ]


def _lanes_of(rank: int, allocation: Allocation) -> Iterator[str]:
    for role in allocation.layouts:
        if (place := allocation.rank_within(role, rank)) is not None:
            yield f"{role} {place}"
