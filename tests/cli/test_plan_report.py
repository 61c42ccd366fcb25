"""How a plan is told: its step in time, and whether training runs it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from flowtrain_lightning.allocator import Allocation, Layout, ModelledCosts
from flowtrain_lightning.cli.plan_bars import bar, step_phases
from flowtrain_lightning.cli.plan_choice import choose_plans, why_plan_cannot_run
from flowtrain_lightning.placement.request import why_it_cannot_run
from tests.allocator.problems import problems

PROBLEMS = problems("gemma-3-4b", devices=16)


@pytest.fixture(scope="module")
def plans():
    return {plan.kind: plan for plan in ModelledCosts(PROBLEMS).predictions()}


@pytest.mark.parametrize("kind", ["uniform", "colocated", "separate", "mixed"])
def test_phases_follow_one_another_until_the_step_ends(plans, kind):
    plan = plans[kind]
    phases = step_phases(plan, PROBLEMS)
    assert list(phases) == ["encoder", "backbone"]
    for of_role in phases.values():
        for one, other in pairwise(of_role):
            assert other.start == pytest.approx(one.start + one.seconds)
    ends = [of_role[-1].start + of_role[-1].seconds for of_role in phases.values()]
    assert max(ends) == pytest.approx(plan.seconds)


def test_roles_on_the_same_devices_take_turns(plans):
    phases = step_phases(plans["colocated"], PROBLEMS)
    assert phases["backbone"][0].start == pytest.approx(plans["colocated"].chosen["encoder"].seconds)


def test_a_backbone_on_devices_of_its_own_first_waits_for_features(plans):
    phases = step_phases(plans["separate"], PROBLEMS)
    assert phases["backbone"][0].purpose == "waiting"
    assert phases["encoder"][0].purpose == "forward"


def test_a_bar_has_a_letter_for_every_sixtieth_of_the_whole():
    assert bar({"forward": 10.0, "backward": 20.0}, 60.0) == "f" * 10 + "b" * 20 + " " * 30


def test_experts_that_are_divided_are_recommended_where_that_pays():
    given = problems("qwen3-vl-30b-a3b", devices=16, device="h200")
    recommended = choose_plans(ModelledCosts(given)).recommended.chosen
    layout = recommended.chosen["backbone"].layout
    assert layout.expert > 1
    assert layout.tensor == 1
    assert why_plan_cannot_run(recommended, given) is None


def test_experts_are_divided_beside_tensor_ranks_and_not_by_deepspeed():
    def reason(backbone):
        layouts = {"encoder": Layout(4), "backbone": backbone}
        return why_it_cannot_run(Allocation("colocated", layouts, dict.fromkeys(layouts, (0, 1, 2, 3))))

    assert reason(Layout(2, tensor=2, expert=2)) is None
    assert reason(Layout(4, expert=2, shard="deepspeed-2")).startswith(
        "divides the backbone's experts among 2 ranks and has "
    )


def test_what_a_trainer_does_not_take_is_no_plan_that_runs(plans):
    given = problems("gemma-3-4b", devices=16, precision="transformer-engine")
    assert why_plan_cannot_run(plans["uniform"], given).startswith("is for precision 'transformer-engine', but")


def test_a_plan_that_training_does_not_run_says_why(plans):
    staged = replace(plans["mixed"].chosen["encoder"], layout=Layout(2, pipeline=8))
    chosen = {**plans["mixed"].chosen, "encoder": staged}
    assert why_plan_cannot_run(replace(plans["mixed"], chosen=chosen), PROBLEMS).startswith("gives the encoder")
