"""Sizes of made-up samples, by hand and by hypothesis; a step's plan of them, and its simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.packing import CostModel, SampleSizes, StepPlan, SyncEvery
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER, Edge
from flowtrain_lightning.packing.simulator import SimulatedStep, simulate_step
from flowtrain_lightning.packing.step_graph import Meeting
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from flowtrain_lightning.packing.step_work import StepRules, StepWork, in_two_passes, step_work

FEATURES = Edge(ENCODER, BACKBONE)
TOKEN_BUDGET = 100
PATCHES_PER_ROW = 4
RANKS = st.integers(1, 4)
BUDGETS = st.sampled_from([1, 20, 60, 10_000])
"""Patches of an encoder batch: those of one media item, of some, of any number."""


def make_sizes(*samples: tuple[int, list[int]]) -> SampleSizes:
    """Sizes of samples given as ``(text tokens, [rows of features of each media item])``."""
    media = [rows for _, of_sample in samples for rows in of_sample]
    counts = [len(of_sample) for _, of_sample in samples]
    text = [tokens for tokens, _ in samples]
    rows = np.array(media, dtype=np.int64)
    return SampleSizes(
        tokens=np.array([tokens + sum(of_sample) for tokens, of_sample in samples], dtype=np.int64),
        targets=np.array(text, dtype=np.int64),
        media_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        media_rows=rows,
        media_patches=rows * PATCHES_PER_ROW,
    )


def sizes_strategy(max_samples: int = 40) -> st.SearchStrategy[SampleSizes]:
    """Steps of up to ``max_samples`` samples within ``TOKEN_BUDGET``, most with several media items or none."""
    sample = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 20), max_size=3))
    return st.lists(sample, max_size=max_samples).map(lambda samples: make_sizes(*samples))


def sharing_strategy(max_samples: int = 20) -> st.SearchStrategy[SampleSizes]:
    """Steps whose samples have a few media items between them, some of them twice, and some that nobody else has."""
    media = st.lists(st.integers(0, 5), max_size=3)
    samples = st.lists(st.tuples(st.integers(1, 40), media), max_size=max_samples)
    return st.tuples(samples, st.lists(st.integers(1, 20), min_size=6, max_size=6)).map(
        lambda made: shared_sizes(*made)
    )


def shared_sizes(samples: list[tuple[int, list[int]]], rows: list[int]) -> SampleSizes:
    """Sizes of samples given as ``(text tokens, numbers of media items)``, whose rows are given by number.

    What number 0 is is not known, so it is never the same.
    """
    sizes = make_sizes(*[(text, [rows[number] for number in media]) for text, media in samples])
    content = np.array([number for _, media in samples for number in media], dtype=np.int64) - 1
    return replace(sizes, media_content=content)


def members_of(
    encoders: int = 1, backbones: int = 1, *, colocated: Sequence[tuple[int, int]] = (), **others: Any
) -> StepMembers:
    """Members of an encoder and a backbone; ``others`` are fields of `StepMembers`."""
    pairs = {ENCODER: tuple(colocated)} if colocated else {}
    return StepMembers({ENCODER: encoders, BACKBONE: backbones}, colocated=pairs, **others)


def shard_of(
    encoders: int = 1, backbones: int = 1, *, encoder: int | None = None, backbone: int | None = None, **others: Any
) -> RankShard:
    """The shard of a rank that belongs to these members; ``others`` are those of `members_of`.

    Where it belongs to one of both roles, so does each of its peers.
    """
    if encoder is not None and backbone is not None:
        others.setdefault("colocated", [(number, number) for number in range(min(encoders, backbones))])
    own = {BACKBONE: backbone, ENCODER: encoder}
    members = members_of(encoders, backbones, **others)
    return RankShard(members, {role: member for role, member in own.items() if member is not None})


def plan_of(
    sizes: SampleSizes,
    encoders: int = 1,
    backbones: int = 1,
    *,
    colocated: Sequence[tuple[int, int]] = (),
    local: bool = False,
    **settings: Any,
) -> StepPlan:
    """The plan of one step of all these samples, within ``TOKEN_BUDGET``; ``settings`` are others of `plan_step`."""
    members = members_of(encoders, backbones, colocated=colocated, local=local)
    return plan_step(sizes, np.arange(len(sizes)), members, token_budget=TOKEN_BUDGET, **settings)


def simulated(plan: StepPlan, cost: CostModel, encoder_cost: CostModel, sync_every: SyncEvery) -> SimulatedStep:
    """The plan's step with an encoder that trains, every member on a rank of its own."""
    work = work_of(plan, cost, encoder_cost)
    meets = {BACKBONE: meeting_of(len(plan.microbatches))} if sync_every == "microbatch" else {}
    return simulate_step(work, StepRules.separate(work, [FEATURES], meets=meets))


def meeting_of(members: int) -> Meeting:
    """Members that need each other in every pass, as those do that gather weights."""
    return Meeting(1, members, ("forward", "backward"))


def work_of(plan: StepPlan, cost: CostModel, encoder_cost: CostModel) -> StepWork:
    """What a plan has its members compute, with an encoder that trains."""
    seconds = {
        BACKBONE: lambda tokens: in_two_passes(cost.of_set(tokens)),
        ENCODER: lambda patches: in_two_passes(encoder_cost.of_set(patches)),
    }
    return step_work(plan, seconds)


def falling(lengths: list[int]) -> np.ndarray:
    """Lengths as the packer's algorithms want them: the longest first."""
    return np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()
