"""Steps in any layout that training runs, simulated by the models of time: where samples are equal, as predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import (
    DEVICES,
    Allocation,
    AllocationError,
    Cluster,
    Layout,
    Workload,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import given_plan
from flowtrain_lightning.packing import PackingError, SampleSizes
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts
from flowtrain_lightning.placement.simulation import plan_on, simulate

LENGTH, EACH, SAMPLES = 1024, 8, 128
"""Tokens of a sample and patches of its picture; samples of a microbatch, and of a step."""

EVERYONE = tuple(range(8))


def colocated(encoder, backbone, **settings):
    layouts = {"encoder": encoder, "backbone": backbone}
    return Allocation("colocated", layouts, dict.fromkeys(layouts, EVERYONE), **settings)


def separate(encoder, backbone):
    ranks = {"encoder": EVERYONE[backbone.ranks :], "backbone": EVERYONE[: backbone.ranks]}
    return Allocation("separate", {"encoder": encoder, "backbone": backbone}, ranks)


def compared(allocation, frozen=(), each=EACH, kept_batches=4):
    """Seconds of a step of equal samples, predicted and simulated, with as many microbatches."""
    predicted, simulated = planned(allocation, frozen, each, kept_batches)
    return predicted.seconds, simulated


def planned(allocation, frozen=(), each=EACH, kept_batches=4):
    """The plan of such a step, and its seconds, simulated with so many encoder batches kept."""
    layouts, lengths, start = allocation.layouts, np.full(SAMPLES, LENGTH), np.arange(SAMPLES + 1)
    sizes = SampleSizes(lengths, lengths, start, lengths, lengths)
    plans = [plan_on(allocation, sizes, np.arange(SAMPLES), each * LENGTH) for _ in range(3)]
    # Packing takes one microbatch more than it has to here and there, which costs what each takes for its weights.
    packed = {"backbone": plans[0].microbatches, "encoder": plans[0].batches["encoder"]}
    budgets = [-(-SAMPLES // (layouts[role].data * len(packed[role][0]))) * LENGTH for role in packed]
    workload = Workload(np.array([LENGTH]), {"image": np.array([LENGTH])}, SAMPLES, *budgets)
    module, device = named_model("qwen2.5-vl-7b").with_frozen(*frozen), DEVICES["h100"]
    problems = role_problems(module, workload, Cluster(device, 8, 8))
    simulated = simulate(plans, allocation, ModelledLayoutCosts(problems, allocation), kept_batches).step_seconds
    return given_plan(problems, allocation), simulated


FSDP, HSDP = Layout(8, shard="fsdp"), Layout(8, shard="fsdp", replicas=2)


@pytest.mark.parametrize(
    "allocation",
    [
        colocated(Layout(8), Layout(8)),
        colocated(FSDP, HSDP),
        colocated(FSDP, FSDP, recompute={"encoder": "full", "backbone": "selective"}),
        colocated(Layout(8, shard="deepspeed-1"), Layout(8, shard="deepspeed-2")),
        colocated(Layout(4, tensor=2), Layout(4, tensor=2, shard="fsdp")),
        colocated(FSDP, Layout(4, context=2, shard="fsdp")),
        colocated(Layout(2, tensor=4), Layout(2, tensor=2, context=2, shard="fsdp")),
    ],
    ids=lambda allocation: "; ".join(layout.describe() for layout in allocation.layouts.values()),
)
def test_equal_samples_on_shared_ranks_take_what_is_predicted(allocation):
    predicted, simulated = compared(allocation)
    assert simulated == pytest.approx(predicted, rel=1e-6)


def test_two_ranks_that_share_even_numbers_of_samples_take_what_is_predicted():
    """Of an odd number one encodes more than the other, which waits."""
    predicted, simulated = compared(colocated(Layout(8), Layout(4, tensor=2)), each=10)
    assert simulated == pytest.approx(predicted, rel=1e-6)


@pytest.mark.parametrize(
    ("encoder", "backbone"),
    [
        (Layout(4), Layout(4)),
        (Layout(4), Layout(2, tensor=2, shard="fsdp")),
        (Layout(2, tensor=2), Layout(2, context=2, shard="fsdp")),
    ],
    ids=lambda layout: layout.describe(),
)
@pytest.mark.parametrize("frozen", [(), ("encoder",)], ids=["all_trains", "encoder_frozen"])
def test_equal_samples_on_ranks_of_their_own_take_what_the_closed_form_says(encoder, backbone, frozen):
    predicted, simulated = compared(separate(encoder, backbone), frozen)
    assert simulated == pytest.approx(predicted, rel=0.02)


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(AllocationError, match="heads"):
        compared(colocated(Layout(8), Layout(1, tensor=8)))


def test_within_a_limit_of_activations_a_step_is_longer_and_memory_is_less():
    free = colocated(Layout(8), Layout(2, pipeline=4), order="searched")
    (all_kept, seconds), (same, as_long), (less, longer) = (
        planned(replace(free, activation_bytes=most)) for most in (None, 1e12, 12e9)
    )
    assert (as_long, same.peak_bytes) == (seconds, all_kept.peak_bytes)
    assert 1.02 * seconds < longer < 4 / 3 * seconds
    assert less.peak_bytes < all_kept.peak_bytes
    assert less.allocation(8) == replace(free, activation_bytes=12e9, recompute=dict.fromkeys(free.layouts, "none"))
    with pytest.raises(PackingError, match="activation_bytes is 1,000,000,000: one batch alone finds no room"):
        planned(replace(free, activation_bytes=1e9))
