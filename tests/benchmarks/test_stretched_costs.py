"""Costs for runs that sleep are those of the model in every layout, and steps are packed by them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.stretched_costs import StretchedCosts, packing_by
from flowtrain_lightning.allocator import (
    ENCODER,
    ROLES,
    Allocation,
    Cluster,
    Layout,
    named_device,
    named_model,
    role_problems,
    typical_workload,
)
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts

EVERYONE = tuple(range(8))
MODULE = named_model("qwen2.5-vl-7b")
PAGES = np.array([8192])


def problems(*frozen):
    module = MODULE.with_frozen(*frozen)
    return role_problems(module, typical_workload(module), Cluster(named_device("h100"), 8, 8))


def costs_of(layout, *frozen):
    allocation = Allocation("colocated", dict.fromkeys(ROLES, layout), dict.fromkeys(ROLES, EVERYONE))
    return ModelledLayoutCosts(problems(*frozen), allocation)


def test_all_times_are_longer_by_the_factor():
    costs = costs_of(Layout(data=8, shard="fsdp"))
    longer = StretchedCosts(costs, 3.0, encoder_trains=True)
    for role in ("backbone", "encoder"):
        assert sum(longer.batch(role, PAGES)) == pytest.approx(3 * sum(costs.batch(role, PAGES)))
    assert sum(longer.end_of_step(ENCODER)) == pytest.approx(3 * sum(costs.end_of_step(ENCODER)))


def test_an_encoder_in_the_tensor_degree_of_a_backbone_takes_more_time_of_all_ranks():
    alone, shared = (
        sum(costs_of(layout).batch("encoder", PAGES)) * layout.ranks_of_member
        for layout in (Layout(data=8), Layout(data=2, tensor=4))
    )
    assert shared > 1.5 * alone


def test_a_frozen_encoder_has_a_forward_only():
    costs = costs_of(Layout(data=8), "encoder")
    forward, backward, _ = costs.batch("encoder", PAGES)
    assert forward > 0
    assert (backward, sum(costs.end_of_step(ENCODER))) == (0.0, 0.0)


@pytest.mark.parametrize("layout", [Layout(data=8, shard="fsdp"), Layout(data=4, tensor=2)], ids=Layout.describe)
def test_batches_are_balanced_by_what_they_take(layout):
    costs = costs_of(layout)
    packing = packing_by(costs, problems())
    for tokens in ([8192], [1000] * 8, [300, 5000]):
        lengths = np.array(tokens)
        assert packing.cost.of_set(lengths) == pytest.approx(sum(costs.batch("backbone", lengths)), rel=0.05)
        encoding = packing.media_costs["encoder"].of_set(lengths)
        assert encoding == pytest.approx(sum(costs.batch("encoder", lengths)), rel=0.1)
