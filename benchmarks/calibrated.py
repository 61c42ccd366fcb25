"""What ``flowtrain plan --calibrate`` says of the benchmarks' modules on two processes of one thread each."""

from __future__ import annotations

from benchmarks.modules import IMAGES, Work, packed_module
from flowtrain_lightning.allocator import (
    BACKBONE,
    ENCODER,
    ROLES,
    Allocation,
    Cluster,
    Layout,
    ModuleDescription,
    describe_dimensions,
    named_device,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import given_plan
from flowtrain_lightning.placement.calibration import measured_efficiencies
from flowtrain_lightning.placement.data_profile import profile_data
from flowtrain_lightning.placement.profile import Profile

PRECISION = "32-true"

ALLOCATIONS = {
    "separate": Allocation("separate", dict.fromkeys(ROLES, Layout(data=1)), {ENCODER: (1,), BACKBONE: (0,)}),
    "colocated": Allocation("colocated", dict.fromkeys(ROLES, Layout(data=2)), dict.fromkeys(ROLES, (0, 1))),
}
"""Placement -> two ranks in it."""


def planned_seconds(module: str, work: Work, profile: Profile) -> dict[str, float]:
    """Placement -> seconds of a step, by the models of time with the shares of peaks that the profile found."""
    description, device = described(module), named_device("cpu")
    data = work.data()
    data.setup("fit")
    shares = measured_efficiencies(profile, description, device, PRECISION)
    workload = profile_data(data, profile).workload
    problems = role_problems(description, workload, Cluster(device, 2, 2), PRECISION, shares)
    return {placement: given_plan(problems, one).seconds for placement, one in ALLOCATIONS.items()}


def described(module: str) -> ModuleDescription:
    """A module of `benchmarks.modules` by its dimensions."""
    sizes = packed_module(module).hparams
    tower, reader = sizes["encoder_width"], sizes["backbone_width"]
    encoder = {
        "layers": sizes["encoder_depth"],
        "hidden": tower,
        "feed_forward": 8 * tower // 3,
        "heads": sizes["encoder_heads"],
        "patch": IMAGES.patch_size,
        "merge": IMAGES.merge_size,
        "gated": True,
        "fused": True,
        "projector_width": IMAGES.merge_size**2 * tower,
        "output": sizes["feature_width"],
    }
    backbone = {
        "layers": sizes["backbone_depth"],
        "hidden": reader,
        "feed_forward": 8 * reader // 3,
        "heads": sizes["backbone_heads"],
        "vocabulary": sizes["vocabulary"],
    }
    found = describe_dimensions({"name": module, "encoders": {"image": encoder}, "backbone": backbone})
    return found.with_frozen("encoder") if sizes["freeze_encoder"] else found
