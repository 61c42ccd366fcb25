"""The best plan of every kind by modelled costs, and what cannot be planned."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import (
    WHOLE_COPIES,
    Allocation,
    Layout,
    ModelledCosts,
    NoPlanError,
    choose_placement,
)
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.allocator.modelled_plan import given_plan, waiting_seconds
from tests.allocator.problems import problems


@pytest.fixture(scope="module")
def costs():
    return ModelledCosts(problems("gemma-3-4b", devices=16))


@pytest.fixture(scope="module")
def plans(costs):
    return {plan.kind: plan for plan in costs.predictions()}


def test_every_kind_is_planned_the_simplest_first_and_fits(costs, plans):
    assert list(plans) == ["uniform", "colocated", "separate", "mixed"]
    limit = usable_bytes(costs.problems.cluster)
    for plan in plans.values():
        assert plan.devices <= 16
        assert plan.peak_bytes <= limit
        assert 0 < plan.mfu < 1


def test_layouts_of_their_own_are_never_slower_than_one_for_all(plans):
    encoder = plans["uniform"].chosen["encoder"].layout
    if encoder.pipeline == 1:
        assert plans["colocated"].seconds <= plans["uniform"].seconds


def test_uniform_means_one_layout(plans):
    layouts = {candidate.layout for candidate in plans["uniform"].chosen.values()}
    assert len(layouts) == 1


def test_a_step_of_separate_roles_takes_the_slowest_ones_time_and_the_waiting(plans):
    plan = plans["separate"]
    slowest = max(candidate.seconds for candidate in plan.chosen.values())
    assert plan.seconds == pytest.approx(slowest + plan.waiting)
    assert plan.waiting > 0


def test_separate_roles_are_idle_where_they_compute_for_less_than_a_step(plans):
    plan = plans["separate"]
    for role, candidate in plan.chosen.items():
        assert plan.idle[role] == pytest.approx(1 - candidate.seconds / plan.seconds)
    assert not any(plans["colocated"].idle.values())


def test_nobody_waits_for_a_frozen_encoder():
    costs = ModelledCosts(problems("gemma-3-4b", devices=16, frozen=("encoder",)))
    assert next(plan for plan in costs.predictions() if plan.kind == "separate").waiting == 0


def test_but_for_one_in_stages_which_does_not_work_ahead():
    layouts, ranks = {"encoder": Layout(1, pipeline=2), "backbone": Layout(2)}, {"encoder": (2, 3), "backbone": (0, 1)}
    given = problems("qwen2.5-vl-3b", devices=4, frozen=("encoder",))
    plan = given_plan(given, Allocation("separate", layouts, ranks))
    assert plan.waiting > 0
    assert waiting_seconds(given, plan.chosen)["backbone"] == 2 * plan.chosen["encoder"].batch_seconds


def test_every_plan_becomes_an_allocation(plans):
    for kind, plan in plans.items():
        allocation = plan.allocation(8)
        assert allocation.placement == {"uniform": "colocated"}.get(kind, kind)
        assert allocation.size == plan.devices
        assert allocation.recompute == {role: one.recompute for role, one in plan.chosen.items()}


@pytest.mark.parametrize(("model", "devices"), [("qwen2.5-vl-7b", 64), ("gemma-3-4b", 64)])
def test_in_a_mixed_plan_all_ranks_of_an_encoder_group_have_the_backbone_or_none_has(model, devices):
    given = problems(model, devices=devices)
    plan = next(plan for plan in ModelledCosts(given).plans(_is_run) if plan.kind == "mixed")
    allocation = plan.allocation(8)
    backbone = set(allocation.ranks["backbone"])
    for group in allocation.shard_groups("encoder"):
        assert backbone.issuperset(group) or backbone.isdisjoint(group)


def _is_run(role, layout):
    return layout.shard in ("replicate", "fsdp")


@pytest.mark.parametrize(
    ("setting", "separation_wins"),
    [({"model": "gemma-3-4b", "devices": 128}, True), ({"model": "qwen2.5-vl-7b", "devices": 8}, False)],
)
def test_the_choice_says_what_separation_gains(setting, separation_wins):
    choice = choose_placement(ModelledCosts(problems(**setting)))
    assert (choice.gain_of_separation > choice.margin) == separation_wins
    assert choice.chosen.separates == separation_wins


@pytest.mark.full
def test_a_module_that_fits_nowhere_says_what_would_do():
    with pytest.raises(NoPlanError, match="fits in no layout on 8 devices h100 of 80 GB") as refusal:
        ModelledCosts(problems("qwen2.5-vl-72b", devices=8)).predictions()
    enough = int(str(refusal.value).rstrip(".").split()[-1])
    plans = ModelledCosts(problems("qwen2.5-vl-72b", devices=enough)).predictions()
    assert min(plan.devices for plan in plans) <= enough
    with pytest.raises(NoPlanError):
        ModelledCosts(problems("qwen2.5-vl-72b", devices=enough - 8)).predictions()


def test_a_search_among_whole_copies_gives_plans_that_only_replicate():
    costs = ModelledCosts(problems("smolvlm-2.2b", devices=8, device="h200", token_budget=4096), WHOLE_COPIES)
    for plan in costs.predictions():
        assert all(candidate.layout.is_whole_copies for candidate in plan.chosen.values())


def test_where_whole_copies_of_both_halves_do_not_fit_separation_works():
    choice = choose_placement(
        ModelledCosts(problems("qwen2.5-vl-3b", devices=8, token_budget=4096, loss_chunk=4096), WHOLE_COPIES)
    )
    assert [plan.kind for plan in choice.predictions] == ["separate"]
    assert choice.reason == "separate is the fastest that is possible, and to have all roles on the same ranks is not"
    assert {role: one.devices for role, one in choice.chosen.chosen.items()} == {"encoder": 2, "backbone": 6}
