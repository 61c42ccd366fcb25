"""Experts that ranks cannot share are refused before the first step, by the name of the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from flowtrain_lightning.allocator import AllocationError, Layout, RoleLayout
from flowtrain_lightning.compute.expert_padding import refuse_padding_beside_balance
from flowtrain_lightning.data import FlowDataModule, PackingConfig
from flowtrain_lightning.trainer.expert_refusals import refuse_undividable_experts
from tests.exactness.mixture import Balanced, Mixture
from tests.tiny import TinyVLM

LAYOUTS = {"encoder": Layout(1), "backbone": Layout(2, expert=2)}
EXPERTS = "backbone.more.0.experts"


@pytest.fixture
def mixture() -> Mixture:
    """A module with four experts in some of its layers."""
    module = Mixture()
    module.configure_model()
    return module


class Doubled(nn.Module):
    """Changes a weight."""

    def forward(self, weight):
        return 2 * weight


def parametrized(module):
    parametrize.register_parametrization(module.get_submodule(EXPERTS), "narrow", Doubled())


def adapt_a_bias(module):
    """Of its vectors, which have two dimensions, ``peft`` makes one adapter for all experts."""
    _adapt(module, "experts.bias")


def adapt_within(module):
    """The stack is of a module within the experts."""
    module.get_submodule(EXPERTS).inner = Inner()
    _adapt(module, "inner.stack")


class Inner(nn.Module):
    """Has a stack of its own."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.ones(4, 2, 2))


def _adapt(module, parameter):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[parameter])
    peft.inject_adapter_in_model(config, module.backbone.more[0])


def add_a_vector(module):
    module.get_submodule(EXPERTS).scale = nn.Parameter(torch.ones(3))


def run_seldom(module):
    module.conditional_modules = ("backbone.more.0",)


def test_experts_that_can_be_divided_are_taken(mixture):
    refuse_undividable_experts(LAYOUTS, mixture)
    _adapt(mixture, "experts.narrow")
    refuse_undividable_experts(LAYOUTS, mixture)
    with pytest.raises(ValueError, match=r"The backbone has tensor 2, but target_parameters adapts .* not shown"):
        refuse_undividable_experts({**LAYOUTS, "backbone": Layout(1, tensor=2)}, mixture)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (parametrized, f"'{EXPERTS}' are parametrized, which ranks that have a share of them cannot compute"),
        (adapt_a_bias, rf"'{EXPERTS}.base_layer.bias' has one adapter for all experts: peft makes one for each where"),
        (adapt_within, f"target_parameters adapts weights of a module within '{EXPERTS}', whose adapters"),
        (
            add_a_vector,
            rf"'{EXPERTS}.scale' has the shape \[3\], which is no stack with an entry for each of 4 experts",
        ),
        (
            run_seldom,
            "'backbone.more.0' is run for some samples and not for others: a rank whose samples",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(mixture, change, words):
    change(mixture)
    with pytest.raises(ValueError, match=f"The backbone has expert 2, but .*{words}"):
        refuse_undividable_experts(LAYOUTS, mixture)


def test_a_degree_that_does_not_divide_the_experts_is_refused(mixture):
    with pytest.raises(ValueError, match=f"'{EXPERTS}' has 4 experts, which 3 ranks cannot share evenly"):
        refuse_undividable_experts({**LAYOUTS, "backbone": Layout(3, expert=3)}, mixture)
    with pytest.raises(ValueError, match=f"expert 4 and tensor 2, but '{EXPERTS}' has 4 experts, which 8 ranks cannot"):
        refuse_undividable_experts({**LAYOUTS, "backbone": Layout(4, tensor=2, expert=4)}, mixture)


def test_tensor_ranks_of_a_stage_share_no_experts(mixture):
    refuse_undividable_experts({**LAYOUTS, "backbone": Layout(1, pipeline=2)}, mixture)
    with pytest.raises(ValueError, match=f"The backbone has tensor 2, but '{EXPERTS}' has experts, .* Leave pipeline"):
        refuse_undividable_experts({**LAYOUTS, "backbone": Layout(1, tensor=2, pipeline=2)}, mixture)


def test_a_half_without_experts_is_refused():
    module = TinyVLM()
    module.configure_model()
    with pytest.raises(ValueError, match=r"TinyVLM has no experts there that ranks could share: .* flow\.Experts"):
        refuse_undividable_experts(LAYOUTS, module)
    for layout in (Layout(2), Layout(1, tensor=2)):
        refuse_undividable_experts({**LAYOUTS, "backbone": layout}, module)


def test_an_expert_degree_fits_into_the_ranks_that_share_weights():
    assert Layout(8, shard="fsdp", replicas=2, expert=4).ranks_of_shard_group == 4
    assert Layout(8, expert=2).ranks_of_shard_group == 2
    assert RoleLayout("fsdp", expert=2).over(4) == Layout(4, shard="fsdp", expert=2)
    with pytest.raises(AllocationError, match="must divide the 2 ranks of a replica"):
        Layout(8, shard="fsdp", replicas=4, expert=4)


def test_experts_that_are_kept_equally_full_refuse_padding():
    module, padded = Balanced(), FlowDataModule("a.jsonl", token_budget=8, packing=PackingConfig(pad_to_budget=True))
    module.configure_model()
    with pytest.raises(ValueError, match=r"'encoder.more.0.experts.* has balance=0.02, .*pad_to_budget=True. adds"):
        refuse_padding_beside_balance(module, padded)
    refuse_padding_beside_balance(module, FlowDataModule("a.jsonl", token_budget=8))
    refuse_padding_beside_balance(Mixture(), padded)
