"""Simulated steps, and where their time goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout, default_allocation
from flowtrain_lightning.data.steps.step_packing import StepPacking
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.placement.layout_costs import ProfiledLayoutCosts
from flowtrain_lightning.placement.measured import Processors, predict_steps
from flowtrain_lightning.placement.simulation import plan_on
from flowtrain_lightning.placement.simulation import simulate as simulate_by
from tests.placement.profiles import make_profile

PROFILE = make_profile(1.0, 1.0)
SEPARATE, COLOCATED = default_allocation(2, "separate", 1), default_allocation(2, "colocated")
MIXED = default_allocation(3, "mixed", 1)


def draw_sizes(draw, samples=8, media=True):
    """Samples with up to two media items each."""
    counts = draw.integers(0, 3, samples) if media else np.zeros(samples, dtype=np.int64)
    patches = draw.integers(5, 40, counts.sum())
    tokens, start = draw.integers(10, 60, samples), np.concatenate([[0], np.cumsum(counts)])
    return SampleSizes(tokens, tokens, start, patches, patches)


def simulate(plans, allocation, profile, kept_batches):
    return simulate_by(plans, allocation, ProfiledLayoutCosts(profile, allocation), kept_batches)


def plan(allocation, sizes, profile):
    samples = np.arange(len(sizes))
    return plan_on(allocation, sizes, samples, 100, profile.cost, profile.media_costs)


def planned(allocation, profile, steps=4, samples=8, media=True, seed=0):
    """The plans of some steps."""
    draw = np.random.default_rng(seed)
    sizes = [draw_sizes(draw, samples, media) for _ in range(steps)]
    return [plan(allocation, each, profile) for each in sizes]


@pytest.mark.parametrize("allocation", [SEPARATE, COLOCATED, MIXED], ids=lambda allocation: allocation.placement)
def test_a_step_is_planned_as_the_data_module_plans_it_on_these_ranks(allocation):
    profile, sizes = make_profile(0.01, 0.02), draw_sizes(np.random.default_rng(1), samples=20)
    ours = plan(allocation, sizes, profile)
    config = StepPacking(100, profile.cost, profile.media_costs)
    theirs = config.plan(sizes, np.arange(20), allocation.step_members())
    for batches, others in ((ours.batches[role], theirs.batches[role]) for role in allocation.roles):
        assert [[b.tolist() for b in rank] for rank in batches] == [[b.tolist() for b in rank] for rank in others]


@pytest.mark.parametrize("trains", [True, False], ids=["all_trains", "encoder_frozen"])
@pytest.mark.parametrize("allocation", [SEPARATE, COLOCATED], ids=["separate", "colocated"])
def test_steps_take_what_is_predicted_and_all_time_is_accounted_for(allocation, trains):
    profile = make_profile(0.01, 0.01, trains, optimizer=0.05, reduction=0.03)
    plans = planned(allocation, profile)
    found = simulate(plans, allocation, profile, 4)
    everyone = Processors((tuple(range(2)),), float("inf"))
    assert len(found.seconds) == len(plans)
    # A prediction also begins and ends with the same step, but the other way round.
    assert found.step_seconds == pytest.approx(predict_steps(plans, allocation, profile, everyone, 4).seconds, rel=0.1)
    for rank_roles in [("encoder", "backbone")] if allocation is COLOCATED else [("encoder",), ("backbone",)]:
        worked = sum(found.shares[role][name] for role in rank_roles for name in found.shares[role] if name != "idle")
        assert worked + found.shares[rank_roles[0]]["idle"] == pytest.approx(1.0, abs=0.02)


def test_the_end_of_a_step_is_told_apart():
    profile = make_profile(0.01, 0.01, optimizer=0.05, reduction=0.03)
    found = simulate(planned(COLOCATED, profile), COLOCATED, profile, 4)
    for role in ("encoder", "backbone"):
        assert found.shares[role]["optimizer"] == pytest.approx(0.05 / found.step_seconds, rel=0.01)
        assert found.shares[role]["reduction"] == pytest.approx(0.03 / found.step_seconds, rel=0.01)


def test_forward_and_backward_are_as_the_profile_has_them():
    trained, frozen = make_profile(0.01, 0.01), make_profile(0.01, 0.01, trains=False)
    found = simulate(planned(SEPARATE, trained), SEPARATE, trained, 4)
    assert found.shares["backbone"]["backward"] == pytest.approx(3 * found.shares["backbone"]["forward"])
    frozen = simulate(planned(SEPARATE, frozen), SEPARATE, frozen, 4)
    assert frozen.shares["encoder"]["backward"] == 0


def test_steps_without_media_leave_encoder_ranks_idle():
    profile = make_profile(0.01, 0.01)
    found = simulate(planned(SEPARATE, profile, media=False), SEPARATE, profile, 4)
    assert found.shares["encoder"]["idle"] == 1
    assert found.shares["backbone"]["idle"] == pytest.approx(0)


def test_a_rank_does_one_thing_at_a_time_for_the_roles_it_has():
    profile = make_profile(1.0, 1.0)
    separate = simulate(planned(SEPARATE, profile), SEPARATE, profile, 4).activities
    assert {(one.rank, one.role) for one in separate} == {(0, "backbone"), (1, "encoder")}
    colocated = simulate(planned(COLOCATED, profile), COLOCATED, profile, 4).activities
    assert {(one.rank, one.role) for one in colocated} == set(product((0, 1), ("encoder", "backbone")))
    profile = make_profile(3.0, 1.0)
    mixed = simulate(planned(MIXED, profile), MIXED, profile, 4).activities
    assert {(one.rank, one.role) for one in mixed} == {*product((0, 1), ("encoder", "backbone")), (2, "encoder")}
    for activities, rank in product((colocated, mixed), (0, 1)):
        times = sorted((one.start, one.end) for one in activities if one.rank == rank)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(times))


ENDS = ("reduction", "optimizer")


def test_ranks_that_hold_shards_gather_and_scatter_for_every_batch():
    profile = make_profile(0.01, 0.01, reduction=0.04)
    layouts = {role: Layout(2, shard="fsdp") for role in ("encoder", "backbone")}
    sharded = Allocation("colocated", layouts, COLOCATED.ranks)
    plans = planned(COLOCATED, profile)
    whole, found = (simulate(plans, allocation, profile, 4) for allocation in (COLOCATED, sharded))
    for role in ("encoder", "backbone"):
        of_layers = [
            sum(one.end - one.start for one in each.activities if one.role == role and one.name not in ENDS)
            for each in (whole, found)
        ]
        assert of_layers[0] < of_layers[1]
        assert found.shares[role]["reduction"] == 0 < whole.shares[role]["reduction"]
        assert found.shares[role]["optimizer"] <= whole.shares[role]["optimizer"] / 2


def test_what_a_backward_computes_again_takes_the_time_of_a_forward():
    profile = make_profile(0.01, 0.01)
    again = replace(SEPARATE, recompute={"backbone": "full"})
    found = (simulate(planned(SEPARATE, profile), one, profile, 4) for one in (SEPARATE, again))
    plain, repeated = (sum(a.end - a.start for a in one.activities if a.role == "backbone") for one in found)
    assert repeated == pytest.approx(plain * (1 + profile.roles["backbone"].forward_share))


@pytest.mark.parametrize(
    ("layouts", "ranks", "words"),
    [
        (
            {"encoder": Layout(1), "backbone": Layout(1, tensor=2)},
            {"encoder": (2,), "backbone": (0, 1)},
            "backbone has data 1, tensor 2, replicate, but a profile of whole layers and sequences does not say",
        ),
        (
            {"encoder_image": Layout(1), "encoder_audio": Layout(1), "backbone": Layout(1)},
            {"encoder_image": (1,), "encoder_audio": (2,), "backbone": (0,)},
            "The profile has the roles encoder, backbone, but the plan has encoder_image, encoder_audio, backbone",
        ),
    ],
)
def test_what_no_profile_tells_is_refused(layouts, ranks, words):
    with pytest.raises(AllocationError, match=words):
        simulate(planned(SEPARATE, PROFILE), Allocation("separate", layouts, ranks), PROFILE, 4)


def test_a_frozen_encoder_whose_ranks_share_weights_works_ahead_as_whole_copies_do():
    profile = make_profile(1.0, 1.0, trains=False)
    layouts = {"encoder": Layout(2, shard="fsdp"), "backbone": Layout(1)}
    sharded = Allocation("separate", layouts, {"encoder": (1, 2), "backbone": (0,)})
    whole = replace(sharded, layouts={**layouts, "encoder": Layout(2)})
    plans = planned(whole, profile)
    assert simulate(plans, sharded, profile, 4).step_seconds == simulate(plans, whole, profile, 4).step_seconds
