"""How ``flowtrain profile`` prints speeds."""

from dataclasses import replace

import pytest

from flowtrain_lightning.cli.profile_command import profile_as_text
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement.profile import FlopModel, ProfileOrigin
from tests.placement.test_profile import PROFILE

FLOPS = FlopModel(CostModel(1e12, 0.0, 0.0), CostModel(2e12, 0.0, 0.0))


def text(device="a processor", precision="bf16-mixed", flops=FLOPS, seconds=1.0):
    half = replace(PROFILE.roles["backbone"], flops=flops, measured=(Observation(100.0, 100.0, seconds),) * 3)
    origin = ProfileOrigin("a.Module 12ab", device, {}, {"precision": precision, "threads": 1})
    return profile_as_text(replace(PROFILE, origin=origin, roles={**PROFILE.roles, "backbone": half}))


def test_the_speed_of_every_size_stands_beside_its_time():
    line = next(line for line in text().splitlines() if line.startswith("backbone  "))
    assert line.endswith("300.0 TFLOP/s")


def test_a_known_device_shows_how_much_of_its_peak_is_reached():
    assert "computes at 300.0 TFLOP/s, 30.3 % of an h200's 989.0 TFLOP/s" in text("NVIDIA H200")
    assert "60.7 % of an h200's 494.0 TFLOP/s" in text("NVIDIA H200", "32-true")


@pytest.mark.parametrize(("device", "precision"), [("a processor", "bf16-mixed"), ("NVIDIA H200", "64-true")])
def test_where_no_peak_is_known_the_speed_stands_alone(device, precision):
    assert "  computes at 3.0 GFLOP/s\n" in text(device, precision, seconds=1e5)


def test_what_could_not_be_counted_is_unknown():
    assert "computes at" not in text(flops=None)
    assert "unknown" in text(flops=None)


@pytest.mark.parametrize(("seconds", "poor"), [((0.9, 2.1, 3.5), False), ((0.9, 2.1, 1.0), True)])
def test_a_fit_that_times_do_not_follow_is_warned_of(seconds, poor):
    measured = tuple(Observation(float(1 + number), 0.0, each) for number, each in enumerate(seconds))
    half = replace(PROFILE.roles["backbone"], cost=CostModel(1.1, 0.0, 0.0), measured=measured)
    printed = profile_as_text(replace(PROFILE, roles={**PROFILE.roles, "backbone": half}))
    warned = "WARNING: the fit is poor, 230 % off at 3. What is planned by this profile may be off as much." in printed
    assert warned == poor


def test_halves_that_did_not_fit_are_said_to_have_been_cut():
    assert "The halves did not fit whole." in profile_as_text(replace(PROFILE, whole=False))
    assert "did not fit" not in profile_as_text(PROFILE)
