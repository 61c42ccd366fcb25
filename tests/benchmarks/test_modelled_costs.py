"""Costs of batches in a layout are those of the planner's model, of which a role's step is made up."""

from __future__ import annotations

import pytest

from benchmarks.modelled_costs import role_cost
from flowtrain_lightning.allocator import (
    BACKBONE,
    ENCODER,
    Cluster,
    Layout,
    named_device,
    named_model,
    role_problems,
    typical_workload,
)
from flowtrain_lightning.allocator.candidates import Candidate

LAYOUTS = [Layout(data=8, shard="fsdp"), Layout(data=2, tensor=4), Layout(data=4, context=2, shard="fsdp")]


def problems(*frozen):
    module = named_model("qwen2.5-vl-7b").with_frozen(*frozen)
    return role_problems(module, typical_workload(module), Cluster(named_device("h100"), 8, 8))


def candidate(role, layout):
    return Candidate(role, layout, "none", 0.0, 0.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_all_microbatches_and_the_end_make_the_planned_step_of_a_role(layout):
    problem = problems()[BACKBONE]
    time = candidate(BACKBONE, layout).details(problem).time
    cost = role_cost(problem, candidate(BACKBONE, layout), stretch=2.0)
    step = float(time.microbatches[0]) * sum(cost.of(float(time.tokens[0]))) + cost.end
    planned = float(time.total[0] - time.stragglers[0])  # ranks that sleep are not slow by chance
    assert step == pytest.approx(2.0 * planned, rel=0.01)


def test_an_encoder_in_the_tensor_degree_of_a_backbone_takes_more_time_of_all_ranks():
    problem = problems()[ENCODER]
    alone, shared = (
        sum(role_cost(problem, candidate(ENCODER, layout), 1.0).of(8192)) * layout.ranks_of_member
        for layout in (Layout(data=8), Layout(data=2, tensor=4))
    )
    assert shared > 1.5 * alone


def test_a_frozen_encoder_has_a_forward_only():
    cost = role_cost(problems("encoder")[ENCODER], candidate(ENCODER, Layout(data=8)), 1.0)
    forward, backward = cost.of(8192)
    assert forward > 0
    assert (backward, cost.end) == (0.0, 0.0)
