"""One searched order of a step's works: stages of encoder and backbone together, within the encoder's budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from flowtrain_lightning.packing.searched.order_of_step import SearchedStep, searched_step
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import TOKEN_BUDGET, make_sizes

STAGES = {role: (f"{role} stage 0", f"{role} stage 1") for role in ("encoder", "backbone")}
SIZES = make_sizes(*[(40, [5, 3]), (60, []), (20, [15])] * 4)


def searched(kept: int, seed: int) -> SearchedStep:
    """The order of a step of two ranks, each with a stage of both roles, at random costs."""
    pipelines = dict.fromkeys(STAGES, StageSchedule(2))
    on_rank = {name: (rank,) for names in STAGES.values() for rank, name in enumerate(names)}
    members = StepMembers(dict.fromkeys(STAGES, 1), pipelines=pipelines, searched=on_rank)
    plan = plan_step(SIZES, np.arange(len(SIZES)), members, token_budget=TOKEN_BUDGET, encoder_budget=60)
    random = np.random.default_rng(seed)
    costs = {role: [random.uniform(1, 20, len(own)).tolist() for own in plan.batches[role]] for role in plan.batches}
    return searched_step(replace(plan, costs=costs), members, kept)


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
            held += (number not in step.recomputed[name][0]) * (1 if kind == "forward" else -1)
            most = max(most, held)
        assert most <= kept


def test_a_rank_turns_from_a_stage_of_one_role_to_that_of_the_other_and_back():
    own = searched(3, 0).own({("encoder stage 1", 0), ("backbone stage 1", 0)})
    roles = [work.batch.role for work in own]
    assert sum(one != other for one, other in pairwise(roles)) > 4
