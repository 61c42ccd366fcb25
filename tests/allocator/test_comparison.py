"""Placements beside each other."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator.candidates import WHOLE_COPIES, usable_bytes
from flowtrain_lightning.allocator.comparison import NoPlanError, compare
from flowtrain_lightning.allocator.placing import allocate
from tests.allocator.problems import problems


@pytest.fixture(scope="module")
def comparison():
    return compare(problems("gemma-3-4b", devices=16))


def test_every_placement_is_planned_and_fits(comparison):
    assert list(comparison.plans) == ["uniform", "colocated", "separate", "mixed"]
    limit = usable_bytes(comparison.problems["backbone"].cluster)
    for plan in comparison.plans.values():
        assert plan.devices <= 16
        assert plan.peak_bytes <= limit
        assert 0 < plan.mfu < 1


def test_the_recommended_plan_is_as_good_as_the_fastest(comparison):
    fastest = min(plan.seconds for plan in comparison.plans.values())
    assert comparison.best.seconds <= 1.03 * fastest


def test_layouts_of_their_own_are_never_slower_than_one_for_all(comparison):
    plans = comparison.plans
    encoder = plans["uniform"].chosen["encoder"].layout
    if encoder.pipeline == 1:
        assert plans["colocated"].seconds <= plans["uniform"].seconds


def test_uniform_means_one_layout(comparison):
    layouts = {candidate.layout for candidate in comparison.plans["uniform"].chosen.values()}
    assert len(layouts) == 1


def test_a_step_of_separate_roles_takes_the_slowest_ones_time_and_the_waiting(comparison):
    plan = comparison.plans["separate"]
    slowest = max(candidate.seconds for candidate in plan.chosen.values())
    assert plan.seconds == pytest.approx(slowest + plan.waiting)
    assert plan.waiting > 0


def test_nobody_waits_for_a_frozen_encoder():
    plan = compare(problems("gemma-3-4b", devices=16, frozen=("encoder",))).plans["separate"]
    assert plan.waiting == 0


def test_every_plan_becomes_an_allocation(comparison):
    for name, plan in comparison.plans.items():
        allocation = allocate(plan, 8)
        assert allocation.placement == {"uniform": "colocated"}.get(name, name)
        assert max(max(ranks) for ranks in allocation.ranks.values()) == plan.devices - 1


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"model": "gemma-3-4b", "devices": 128}, "wins"),
        ({"model": "qwen2.5-vl-7b", "devices": 8}, "loses"),
    ],
)
def test_the_verdict_says_what_separation_does_and_by_how_much(setting, word):
    comparison = compare(problems(**setting))
    gain = comparison.gain_of_separation()
    assert f"{word} {100 * abs(gain):.1f} % samples/s" in comparison.verdict()
    assert (gain > 0) == (word == "wins")


def test_a_module_that_fits_nowhere_says_what_would_do():
    with pytest.raises(NoPlanError, match="fits in no layout on 8 devices h100 of 75 GB") as refusal:
        compare(problems("qwen2.5-vl-72b", devices=8))
    enough = int(str(refusal.value).rstrip(".").split()[-1])
    assert compare(problems("qwen2.5-vl-72b", devices=enough)).best.devices <= enough
    with pytest.raises(NoPlanError):
        compare(problems("qwen2.5-vl-72b", devices=enough - 8))


def test_a_runtime_that_only_replicates_gets_plans_that_only_replicate():
    comparison = compare(problems("smolvlm-2.2b", devices=8, device="h200", token_budget=4096), WHOLE_COPIES)
    for plan in comparison.plans.values():
        for candidate in plan.chosen.values() if plan else ():
            assert candidate.layout.shard == "replicate"
            assert candidate.layout.ranks == candidate.layout.data
