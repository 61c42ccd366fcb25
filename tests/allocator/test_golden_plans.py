"""Plans of five public models on 8, 64 and 512 H100, reviewed by eye; docs/planning.md explains them and three more.

A change of a model of time or memory may change them. Then look at each, and write what is right into both places.
"""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import WHOLE_COPIES, ModelledCosts, NoPlanError, choose_placement
from tests.allocator.problems import problems

SAMPLES = {8: 256, 64: 512, 512: 4096}
"""Devices -> samples of a step."""

GOLDEN = {
    ("smolvlm-2.2b", 8): ("uniform; encoder data 8, zero1, selective; backbone data 8, zero1, selective"),
    ("qwen2.5-vl-7b", 8): ("uniform; encoder data 8, fsdp, full; backbone data 8, fsdp, selective"),
    ("qwen2-audio-7b", 8): ("uniform; encoder data 8, fsdp, full; backbone data 8, fsdp, selective"),
    ("gemma-3-27b", 8): (
        "uniform; encoder data 1, tensor 8, replicate, full; backbone data 1, tensor 8, replicate, selective"
    ),
    ("qwen2.5-vl-72b", 8): ("the smallest number that would do is 24"),
    ("smolvlm-2.2b", 64): ("uniform; encoder data 32, tensor 2, zero1, none; backbone data 32, tensor 2, zero1, none"),
    ("qwen2.5-vl-7b", 64): (
        "uniform; encoder data 64, fsdp, 2 replicas, full; backbone data 64, fsdp, 2 replicas, none"
    ),
    ("qwen2-audio-7b", 64): (
        "uniform; encoder data 32, tensor 2, zero1, selective; backbone data 32, tensor 2, zero1, selective"
    ),
    ("gemma-3-27b", 64): (
        "colocated; encoder data 32, tensor 2, zero1, full; backbone data 8, tensor 4, pipeline 2, zero1, none"
    ),
    ("qwen2.5-vl-72b", 64): (
        "uniform; "
        "encoder data 2, tensor 4, pipeline 8, zero1, none; "
        "backbone data 2, tensor 4, pipeline 8, zero1, selective"
    ),
    ("smolvlm-2.2b", 512): (
        "uniform; encoder data 256, tensor 2, replicate, none; backbone data 256, tensor 2, replicate, none"
    ),
    ("qwen2.5-vl-7b", 512): (
        "uniform; encoder data 512, fsdp, 16 replicas, full; backbone data 512, fsdp, 16 replicas, none"
    ),
    ("qwen2-audio-7b", 512): (
        "uniform; encoder data 512, fsdp, 8 replicas, none; backbone data 512, fsdp, 8 replicas, selective"
    ),
    ("gemma-3-27b", 512): (
        "colocated; "
        "encoder data 256, tensor 2, fsdp, 64 replicas, selective; "
        "backbone data 64, tensor 4, pipeline 2, zero1, none"
    ),
    ("qwen2.5-vl-72b", 512): (
        "uniform; "
        "encoder data 16, tensor 4, pipeline 8, zero1, none; "
        "backbone data 16, tensor 4, pipeline 8, zero1, selective"
    ),
}


def planned(model, devices):
    """The recommended plan in words, or the end of the sentence that refuses."""
    try:
        costs = ModelledCosts(problems(model, devices=devices, global_batch_size=SAMPLES[devices]))
        best = choose_placement(costs).chosen
    except NoPlanError as refusal:
        return str(refusal).split("; ")[1].rstrip(".")
    layouts = [f"{role} {one.layout.describe()}, {one.recompute}" for role, one in best.chosen.items()]
    return "; ".join([best.name, *layouts])


@pytest.mark.parametrize(("model", "devices"), GOLDEN)
def test_a_public_model_gets_the_plan_that_was_reviewed(model, devices):
    assert planned(model, devices) == GOLDEN[model, devices]


def test_where_whole_copies_of_both_halves_do_not_fit_separation_works():
    choice = choose_placement(ModelledCosts(problems("qwen2.5-vl-3b", devices=8, token_budget=4096), WHOLE_COPIES))
    assert [plan.kind for plan in choice.predictions] == ["separate"]
    assert choice.reason == "separate is the fastest that is possible, and to have all roles on the same ranks is not"
    assert {role: one.devices for role, one in choice.chosen.chosen.items()} == {"encoder": 2, "backbone": 6}
