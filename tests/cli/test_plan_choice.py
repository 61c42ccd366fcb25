"""Which plan is recommended: never one that training refuses, whatever is searched."""

from __future__ import annotations

from flowtrain_lightning.allocator import ROLES, Layout, ModelledCosts, SearchSpace
from flowtrain_lightning.cli.plan_choice import choose_plans, why_plan_cannot_run
from tests.allocator.problems import problems


def test_plans_with_deepspeed_are_not_searched():
    assert not any(Layout(2, shard=shard).by_deepspeed for shard in SearchSpace().shard)


def test_with_deepspeed_mixed_ranks_and_shared_layers_are_not_recommended():
    asked = problems("qwen2-vl-2b", devices=4)
    space = SearchSpace(pipeline=(1,), context=(1,), shard=("deepspeed-1", "deepspeed-2"))
    costs = ModelledCosts(asked, space)
    refused = [plan for plan in costs.predictions() if why_plan_cannot_run(plan, asked) is not None]
    assert "mixed" in {plan.kind for plan in refused}
    recommended = choose_plans(costs).recommended.predictions
    assert recommended
    assert "mixed" not in {plan.kind for plan in recommended}
    assert all(plan.chosen[role].layout.tensor == 1 for plan in recommended for role in ROLES)
