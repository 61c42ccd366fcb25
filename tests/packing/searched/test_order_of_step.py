"""One searched order of a step's works: stages of encoder and backbone together, within the encoder's budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flowtrain_lightning.packing.searched.order_of_step import SearchedStep, searched_step
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_graph import BatchOf
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import TOKEN_BUDGET, make_sizes

STAGES = {role: (f"{role} stage 0", f"{role} stage 1") for role in ("encoder", "backbone")}
SIZES = make_sizes(*[(40, [5, 3]), (60, []), (20, [15])] * 4)


PARTS = tuple(name for names in STAGES.values() for name in names)
ROW_BYTES = dict(zip(PARTS, (3.0, 3.0, 5.0, 8.0), strict=True))
MEMBERS = StepMembers(
    dict.fromkeys(STAGES, 1),
    pipelines=dict.fromkeys(STAGES, StageSchedule(2)),
    searched={name: (rank,) for names in STAGES.values() for rank, name in enumerate(names)},
)
PLAN = plan_step(SIZES, np.arange(len(SIZES)), MEMBERS, token_budget=TOKEN_BUDGET, encoder_budget=60)


def searched(
    kept: int, seed: int, row_bytes: dict[str, float] = ROW_BYTES, own_ranks: list[int] | None = None, **limit: Any
) -> SearchedStep:
    """The order of a step of two ranks, each with a stage of both roles, at random costs."""
    random = np.random.default_rng(seed)
    costs = {role: [random.uniform(1, 20, len(own)).tolist() for own in PLAN.batches[role]] for role in PLAN.batches}
    return searched_step(replace(PLAN, costs=costs), replace(MEMBERS, **limit), kept, row_bytes, own_ranks)


def held_at_most(step: SearchedStep) -> list[float]:
    """``[ranks]`` the most bytes of activations that each has; all of its own while a batch runs."""
    held, most = [0.0, 0.0], [0.0, 0.0]
    for kind, batch in ((work.kind, work.batch) for work in step.works):
        rank, own = MEMBERS.searched[batch.role][0], ROW_BYTES[batch.role] * PLAN.length(named(batch))
        stays = own if batch not in step.recomputed | step.moved else 0.0
        held[rank] -= stays * (kind == "backward")
        most[rank] = max(most[rank], held[rank] + own)
        held[rank] += stays * (kind == "forward")
    return most


@pytest.mark.parametrize("seed", range(3))
def test_each_batch_goes_through_its_stages_and_comes_back(seed):
    places = {work: place for place, work in enumerate(searched(2, seed).works)}
    for names in STAGES.values():
        for work in (work for work in places if work.batch.role == names[0]):
            other = work._replace(batch=work.batch._replace(role=names[1]))
            assert (places[work] < places[other]) == (work.kind == "forward")


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_no_stage_of_the_encoder_keeps_more_batches_than_it_may(kept):
    step = searched(kept, 0)
    for name in STAGES["encoder"]:
        held = most = 0
        for kind, number in step.passes(name, 0):
            held += (BatchOf(name, 0, number) not in step.recomputed) * (1 if kind == "forward" else -1)
            most = max(most, held)
        assert most <= kept


def test_a_rank_turns_from_a_stage_of_one_role_to_that_of_the_other_and_back():
    own = searched(3, 0).own({("encoder stage 1", 0), ("backbone stage 1", 0)})
    roles = [work.batch.role for work in own]
    assert sum(one != other for one, other in pairwise(roles)) > 4


@pytest.mark.parametrize("seed", range(3))
def test_within_a_limit_of_bytes_batches_give_up_what_finds_no_room(seed):
    free = searched(9, seed)
    largest = max(ROW_BYTES[work.batch.role] * PLAN.length(named(work.batch)) for work in free.works)
    least, most = largest, max(held_at_most(free))
    assert not free.recomputed | free.moved
    for share in (0.0, 0.5):
        limit = least + share * (most - least)
        step = searched(9, seed, activation_bytes=limit, moving=("backbone",))
        assert step.works == free.works
        assert max(held_at_most(step)) <= limit * (1 + 1e-9)
        assert {batch.role.split()[0] for batch in step.recomputed} <= {"encoder"}
        assert {batch.role.split()[0] for batch in step.moved} <= {"backbone"}
        assert len(step.recomputed | step.moved) < len(free.works) / 2  # others keep theirs
        assert step == searched(9, seed, activation_bytes=limit, moving=("backbone",))
    assert searched(9, seed, activation_bytes=most).recomputed == set()


def test_a_batch_of_which_it_is_not_known_what_it_keeps_keeps_nothing():
    step = searched(9, 0, {}, activation_bytes=1.0, moving=("encoder", "backbone"))
    assert step.recomputed == {work.batch for work in step.works}
    assert not step.moved


def named(batch: BatchOf) -> BatchOf:
    """The batch as the plan has it, whose parts go through the stages."""
    return batch._replace(role=batch.role.split()[0])


def test_a_rank_chooses_for_its_own_batches_what_all_would_choose_for_it():
    limit = {"activation_bytes": max(held_at_most(searched(9, 0))) * 0.6, "moving": ("backbone",)}
    of_all = searched(9, 0, **limit)
    for rank in range(2):
        own = searched(9, 0, own_ranks=[rank], **limit)
        for one, other in ((own.recomputed, of_all.recomputed), (own.moved, of_all.moved)):
            assert one == {batch for batch in other if MEMBERS.searched[batch.role][0] == rank}
