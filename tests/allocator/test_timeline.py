"""A planned step in time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flowtrain_lightning.allocator.comparison import compare
from flowtrain_lightning.allocator.timeline import timeline
from tests.allocator.problems import problems


@pytest.fixture(scope="module")
def comparison():
    return compare(problems("gemma-3-4b", devices=16))


@pytest.mark.parametrize("name", ["uniform", "colocated", "separate", "mixed"])
def test_phases_follow_one_another_until_the_step_ends(comparison, name):
    plan = comparison.plans[name]
    phases = timeline(plan, comparison.problems)
    assert list(phases) == ["encoder", "backbone"]
    for spans in phases.values():
        for one, other in pairwise(spans):
            assert other.start == pytest.approx(one.start + one.seconds)
    assert max(spans[-1].start + spans[-1].seconds for spans in phases.values()) == pytest.approx(plan.seconds)


def test_roles_on_the_same_devices_take_turns(comparison):
    phases = timeline(comparison.plans["colocated"], comparison.problems)
    assert phases["backbone"][0].start == pytest.approx(comparison.plans["colocated"].chosen["encoder"].seconds)


def test_a_backbone_on_devices_of_its_own_first_waits_for_features(comparison):
    phases = timeline(comparison.plans["separate"], comparison.problems)
    assert phases["backbone"][0].purpose == "waiting"
    assert phases["encoder"][0].purpose == "forward"
