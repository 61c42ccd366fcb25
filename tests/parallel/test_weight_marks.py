"""Attributes of weights outlast that other weights take their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowtrain_lightning.parallel.unfilled_weights import build_without_weights
from flowtrain_lightning.parallel.weight_marks import keeping_marks


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        self.layer = nn.Linear(3, 3)
        self.layer.weight.decays = False
        self.read = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.read.decays = True


def test_weights_that_take_the_place_of_others_have_their_marks():
    module = Marked()
    with keeping_marks(module):
        module.layer.weight = nn.Parameter(torch.zeros(3, 3))
        module.layer.bias = nn.Parameter(torch.zeros(3))
        module.read = nn.Parameter(torch.zeros(2))
        module.read.decays = "said since"
    assert vars(module.layer.weight) == {"decays": False}
    assert vars(module.layer.bias) == {}
    assert vars(module.read) == {"decays": "said since"}


@pytest.mark.parametrize("wanted", ["layer", "read"])
def test_weights_that_are_built_without_memory_have_their_marks_when_they_are_filled(wanted):
    module = Marked()
    weights = build_without_weights(module, module.build, ("weights",))
    assert weights is not None
    weights.fill(module, lambda name: name.startswith(wanted), torch.device("cpu"))
    assert module.layer.weight.decays is False
    assert module.read.decays is True
