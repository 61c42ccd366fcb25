"""Played steps, and where their time goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout, default_allocation
from flowtrain_lightning.data.step_packing import StepPacking
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.placement.prediction import Processors, predict
from flowtrain_lightning.placement.simulation import simulate
from flowtrain_lightning.placement.steps import part_of
from tests.placement.profiles import make_profile

SEPARATE, COLOCATED = default_allocation(2, "separate", 1), default_allocation(2, "colocated")


def planned(allocation, steps=4, samples=8, media=True, seed=0):
    """Steps of samples with up to two pictures each."""
    draw = np.random.default_rng(seed)
    part, found = part_of(allocation, 0), []
    for _ in range(steps):
        counts = draw.integers(0, 3, samples) if media else np.zeros(samples, dtype=np.int64)
        patches = draw.integers(5, 40, counts.sum())
        tokens, start = draw.integers(10, 60, samples), np.concatenate([[0], np.cumsum(counts)])
        sizes = SampleSizes(tokens, tokens, start, patches, patches)
        found.append(StepPacking(100).plan(sizes, np.arange(samples), part))
    return found


@pytest.mark.parametrize("trains", [True, False], ids=["all_trains", "encoder_frozen"])
@pytest.mark.parametrize("allocation", [SEPARATE, COLOCATED], ids=["separate", "colocated"])
def test_steps_take_what_is_predicted_of_them_and_all_time_is_accounted_for(allocation, trains):
    profile = make_profile(0.01, 0.01, trains, optimizer=0.05, reduction=0.03)
    plans = planned(allocation)
    found = simulate(plans, allocation, profile, 4)
    everyone = Processors((tuple(range(2)),), float("inf"))
    assert len(found.seconds) == len(plans)
    # A prediction also begins and ends with the same step, but the other way round.
    assert found.step_seconds == pytest.approx(predict(plans, allocation, profile, everyone, 4).seconds, rel=0.1)
    for rank_roles in [("encoder", "backbone")] if allocation is COLOCATED else [("encoder",), ("backbone",)]:
        worked = sum(found.shares[role][name] for role in rank_roles for name in found.shares[role] if name != "idle")
        assert worked + found.shares[rank_roles[0]]["idle"] == pytest.approx(1.0, abs=0.02)


def test_the_end_of_a_step_is_told_apart():
    found = simulate(planned(COLOCATED), COLOCATED, make_profile(0.01, 0.01, optimizer=0.05, reduction=0.03), 4)
    for role in ("encoder", "backbone"):
        assert found.shares[role]["optimizer"] == pytest.approx(0.05 / found.step_seconds, rel=0.01)
        assert found.shares[role]["reduction"] == pytest.approx(0.03 / found.step_seconds, rel=0.01)


def test_forward_and_backward_are_as_the_profile_has_them():
    found = simulate(planned(SEPARATE), SEPARATE, make_profile(0.01, 0.01), 4)
    assert found.shares["backbone"]["backward"] == pytest.approx(3 * found.shares["backbone"]["forward"])
    frozen = simulate(planned(SEPARATE), SEPARATE, make_profile(0.01, 0.01, trains=False), 4)
    assert frozen.shares["encoder"]["backward"] == 0


def test_steps_without_media_leave_encoder_ranks_idle():
    found = simulate(planned(SEPARATE, media=False), SEPARATE, make_profile(0.01, 0.01), 4)
    assert found.shares["encoder"]["idle"] == 1
    assert found.shares["backbone"]["idle"] == pytest.approx(0)


def test_timelines_name_the_lanes_of_every_rank():
    labels = [one["label"] for one in simulate(planned(SEPARATE), SEPARATE, make_profile(1.0, 1.0), 4).timelines]
    assert labels == ["backbone 0", "encoder 0"]
    both = simulate(planned(COLOCATED), COLOCATED, make_profile(1.0, 1.0), 4).timelines
    assert [one["label"] for one in both] == ["encoder 0 and backbone 0", "encoder 1 and backbone 1"]
    assert {span.lane for span in both[0]["spans"]} == {"encoder", "backbone"}


@pytest.mark.parametrize(
    ("layouts", "ranks", "words"),
    [
        (
            {"encoder": Layout(1), "backbone": Layout(1, tensor=2)},
            {"encoder": (2,), "backbone": (0, 1)},
            "backbone has .*whole copy of its half; make the plan with `flowtrain plan --whole-copies`",
        ),
        (
            {"encoder_image": Layout(1), "encoder_audio": Layout(1), "backbone": Layout(1)},
            {"encoder_image": (1,), "encoder_audio": (2,), "backbone": (0,)},
            "A profile has the roles encoder and backbone, but the plan has encoder_image, encoder_audio, backbone",
        ),
    ],
)
def test_what_no_profile_tells_is_refused(layouts, ranks, words):
    with pytest.raises(AllocationError, match=words):
        simulate(planned(SEPARATE), Allocation("separate", layouts, ranks), replace(make_profile(1.0, 1.0)), 4)
