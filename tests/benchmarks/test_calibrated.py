"""Modules of the benchmarks as dimensions, for the models of time to be held against what is measured."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.calibrated import ALLOCATIONS, described
from benchmarks.modules import MODULES, packed_module


@pytest.mark.parametrize("name", MODULES)
def test_dimensions_have_the_parameters_of_the_module(name):
    module = packed_module(name)
    module.configure_model()
    halves: dict[str, nn.Module] = {"encoder": module.encoder, "backbone": module.backbone}
    for role, half in described(name).roles.items():
        built = sum(weight.numel() for weight in halves[role].parameters())
        assert half.parameters == pytest.approx(built, rel=0.05)
        assert half.trains == any(weight.requires_grad for weight in halves[role].parameters())


def test_both_placements_have_two_ranks():
    assert {name: one.size for name, one in ALLOCATIONS.items()} == {"separate": 2, "colocated": 2}
