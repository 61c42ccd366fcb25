"""Planning with a profile predicts the times that were measured."""

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import Cluster, Workload, describe_dimensions, named_device, role_problems
from flowtrain_lightning.allocator.collectives import ring
from flowtrain_lightning.allocator.kernels import moving_seconds
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.allocator.role_time import role_time
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement.calibration import measured_efficiencies
from flowtrain_lightning.placement.profile import Profile, ProfileError, ProfileOrigin, ReductionCost, RoleProfile

VISION = {"layers": 2, "hidden": 64, "feed_forward": 128, "heads": 4, "patch": 8, "merge": 2}
READER = {"layers": 2, "hidden": 64, "feed_forward": 128, "heads": 4, "vocabulary": 512}
MODULE = describe_dimensions({"name": "small", "encoders": {"image": VISION}, "backbone": READER})
CPU = named_device("cpu")
LENGTH, COUNT = 64, 8


def observed(seconds):
    """A full microbatch of equal sequences, and an eighth of it that took far longer than its share."""
    tokens = float(LENGTH * COUNT)
    return (Observation(tokens, LENGTH * tokens, seconds), Observation(LENGTH, LENGTH**2, seconds))


def profile_of(trains=True, encoder_parameters=MODULE.encoders["image"].parameters, precision="32-true"):
    def role(parameters, trains, seconds):
        return RoleProfile(CostModel(1.0, 0.0, 0.0), trains, parameters, 0, 0.0, 0.4, observed(seconds))

    roles = {
        "encoder": role(encoder_parameters, trains, 0.02),
        "backbone": role(MODULE.backbone.parameters, True, 0.05),
    }
    return Profile(ProfileOrigin("small", "a processor", {}, {"precision": precision}), roles, 256)


def problems_of(module, efficiencies, precision="32-true", microbatches=1):
    workload = Workload(
        np.array([LENGTH]), {"image": np.array([LENGTH])}, COUNT * microbatches, LENGTH * COUNT, LENGTH * COUNT
    )
    return role_problems(module, workload, Cluster(CPU, 2, 2), precision, efficiencies)


def planned(module, profile, precision, microbatches):
    """Role -> its problem, and seconds of a step of so many full microbatches on one device, but for the optimizer."""
    efficiencies = measured_efficiencies(profile, module, CPU, precision)
    found = {}
    for role, problem in problems_of(module, efficiencies, precision, microbatches).items():
        time = role_time(problem, Family(np.ones(1)))
        found[role] = problem, float((time.total - time.optimizer)[0])
    return found


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_plan_of_one_device_repeats_what_was_measured(precision, trains):
    """Profiles add every gradient to another one, while the first microbatch of a step has none to add to."""
    module = MODULE if trains else MODULE.with_frozen("encoder")
    profile = profile_of(trains=trains, precision=precision)
    one, two = (planned(module, profile, precision, count) for count in (1, 2))
    for role, measured in (("encoder", 0.02), ("backbone", 0.05)):
        problem, alone = one[role]
        assert two[role][1] - alone == pytest.approx(measured)
        spared = moving_seconds(3.0 * 4 * problem.half.trainable_parameters, CPU, problem.efficiency)
        assert alone + spared == pytest.approx(measured)


def test_a_profile_of_a_known_device_serves_for_another_one():
    profile = profile_of(precision="bf16-mixed")
    profile = replace(profile, origin=replace(profile.origin, device="NVIDIA H100 80GB HBM3"))
    there, here = named_device("h100"), named_device("b200")
    measured = measured_efficiencies(profile, MODULE, there, "bf16-mixed")
    translated = measured_efficiencies(profile, MODULE, here, "bf16-mixed")
    for role, shares in translated.items():
        assert shares.dense / measured[role].dense == pytest.approx(here.dense / there.dense)
        assert shares.launch == pytest.approx(measured[role].launch)


def test_a_half_that_was_not_measured_is_left_to_assumptions():
    profile = profile_of()
    unmeasured = replace(profile.roles["encoder"], measured=())
    profile = replace(profile, roles={**profile.roles, "encoder": unmeasured})
    assert set(measured_efficiencies(profile, MODULE, CPU, "32-true")) == {"backbone"}


def test_sums_of_gradients_take_their_measured_time_and_nothing_hides_them():
    profile, size = replace(profile_of(), reduction=ReductionCost(2, 0.0, 1e-9)), 1e9
    for measured in measured_efficiencies(profile, MODULE, CPU, "32-true").values():
        among_two, among_four = (ring(Cluster(CPU, 4, 4), ranks, 1, measured.exchange).reduce(size) for ranks in (2, 4))
        assert float(among_two) == pytest.approx(1.0, rel=1e-3)
        assert float(among_four) == pytest.approx(profile.reduction.seconds(int(size), 4), rel=1e-3)
        assert measured.contention == 1.0


def test_updates_take_what_the_optimizer_was_measured_to_take():
    profile = profile_of()
    roles = {role: replace(half, optimizer_seconds=0.03) for role, half in profile.roles.items()}
    measured = measured_efficiencies(replace(profile, roles=roles), MODULE, CPU, "32-true")
    for problem in problems_of(MODULE, measured).values():
        assert float(role_time(problem, Family(np.ones(1))).optimizer[0]) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (profile_of(encoder_parameters=10_000_000), r"encoder has 10.00M parameters, but that of small has 0.\d\dM"),
        (profile_of(precision="bf16-mixed"), "is of bf16-mixed, but the plan is for 32-true"),
        (profile_of(trains=False), "The encoder is frozen in the profile, but trains in the plan"),
    ],
)
def test_a_profile_of_something_else_is_refused(profile, said):
    with pytest.raises(ProfileError, match=said):
        measured_efficiencies(profile, MODULE, CPU, "32-true")


def test_a_module_with_two_encoders_has_no_profile():
    audio = {"layers": 2, "hidden": 64, "feed_forward": 128, "heads": 4, "bins": 8}
    two = describe_dimensions({"name": "two", "encoders": {"image": VISION, "audio": audio}, "backbone": READER})
    with pytest.raises(ProfileError, match="two has encoder_image as well"):
        measured_efficiencies(profile_of(), two, CPU, "32-true")
