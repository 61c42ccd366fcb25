"""Profiles with round numbers."""

from __future__ import annotations

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, ReductionCost, RoleProfile

ORIGIN = ProfileOrigin("a.Module 12ab", "a processor", {"torch": "2"}, {"precision": "32-true"})


def make_profile(
    encoder: float, backbone: float, trains: bool = True, optimizer: float = 0.0, reduction: float = 0.0
) -> Profile:
    """So many seconds for a patch and a token, for each half's optimizer step, and for two ranks' reduction."""
    measured = (Observation(1.0, 1.0, 1.0),)
    size = 4 if trains else 0
    roles = {
        "encoder": RoleProfile(
            CostModel(encoder, 0.0, 0.0), trains, 1, size, optimizer if trains else 0.0, 0.25, measured
        ),
        "backbone": RoleProfile(CostModel(backbone, 0.0, 0.0), True, 1, 4, optimizer, 0.25, measured),
    }
    return Profile(ORIGIN, roles, 8, ReductionCost(2, 0.0, reduction / 4))
