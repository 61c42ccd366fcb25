"""Plans that are compared: each the fastest of its kind, by the planner's costs."""

from __future__ import annotations

import pytest

from benchmarks.layout_cells import as_run
from benchmarks.layout_plans import PER_NODE, RECOMMENDED, SYNCHRONOUS, UNSHARDED, best_plans, choice_of_a_run
from flowtrain_lightning.allocator import Cluster, named_device, named_model, role_problems, typical_workload
from flowtrain_lightning.cli.plan_choice import why_plan_cannot_run


@pytest.fixture(scope="module")
def problems():
    module = named_model("qwen2.5-vl-7b").with_frozen("encoder")
    return role_problems(module, typical_workload(module), Cluster(named_device("h100"), 8, PER_NODE))


@pytest.fixture(scope="module")
def found(problems):
    return best_plans(problems)


def test_every_plan_runs_as_ranks_that_sleep(problems, found):
    assert {UNSHARDED, RECOMMENDED, SYNCHRONOUS, "uniform"} <= set(found)
    for kind, plan in found.items():
        layouts = as_run(plan.allocation(PER_NODE)).layouts
        assert kind == UNSHARDED or why_plan_cannot_run(plan, problems) is None
        assert all(layout.shard in ("replicate", "fsdp") for layout in layouts.values())


def test_the_unsharded_plan_is_uniform_and_keeps_whole_weights(found):
    layouts = [one.layout for one in found[UNSHARDED].chosen.values()]
    assert len(set(layouts)) == 1
    assert layouts[0].shard in ("replicate", "zero1")


def test_the_recommended_plan_is_no_faster_than_the_fastest_of_its_kind(found):
    recommended = found[RECOMMENDED]
    assert recommended.seconds >= found[recommended.kind].seconds * (1 - 1e-9)


def test_a_run_chooses_by_simulated_times_and_the_plainer_of_equal_ones(found):
    slow = dict.fromkeys(found, 2.0)
    assert choice_of_a_run(found, slow) == "uniform"
    assert choice_of_a_run(found, slow | {"separate": 1.9}) == "separate"
    assert choice_of_a_run(found, slow | {"separate": 1.99}) == "uniform"


def test_encoding_first_takes_the_ranks_with_which_both_sides_together_take_least(found):
    both = [sum(one.seconds for one in found[kind].chosen.values()) for kind in (SYNCHRONOUS, "separate")]
    assert found[SYNCHRONOUS].seconds == pytest.approx(both[0])
    assert both[0] <= both[1] * (1 + 1e-9)
