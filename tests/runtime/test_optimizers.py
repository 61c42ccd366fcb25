"""The state of an optimizer by parameter name: it finds its parameters again in any order and on any rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowtrain_lightning.runtime.optimizers import NamedOptimizer, with_numbers


def model(absent=()):
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c")})
    for name in absent:
        module[name].to("meta")
    return module


def trained(module, groups, optimizer=torch.optim.AdamW):
    """An optimizer over groups of names that has made a step; the gradient of ``a`` is 1, of ``b`` 2, of ``c`` 3."""
    inner = optimizer([{"params": [module[name].weight for name in names], **rest} for names, rest in groups], lr=0.1)
    named = NamedOptimizer(inner, module)
    for number, name in enumerate(("a", "b", "c"), 1):
        if not module[name].weight.is_meta:
            module[name].weight.grad = torch.full((2, 2), float(number))
    inner.step()
    return inner, named


def averages(inner, module):
    """For each parameter the first moment of its gradient, as a number."""
    present = [name for name in module if not module[name].weight.is_meta]
    return {name: round(float(inner.state[module[name].weight]["exp_avg"][0, 0]), 6) for name in present}


def test_state_goes_to_the_parameter_of_its_name_also_when_a_group_lists_them_in_another_order():
    _, named = trained(model(), [(["a", "b", "c"], {})])
    saved = named.state()
    module = model()
    inner, other = trained(module, [(["c", "a", "b"], {})])
    for name in module:
        inner.state[module[name].weight]["exp_avg"].zero_()
    other.load(saved)
    assert averages(inner, module) == {"a": 0.1, "b": 0.2, "c": 0.3}


@pytest.mark.parametrize("absent", [("a",), ("b", "c"), ("a", "b")])
def test_a_rank_takes_its_own_part_and_its_groups_line_up(absent):
    groups = [(["a", "b"], {"weight_decay": 0.5}), (["c"], {"weight_decay": 0.0})]
    _, whole = trained(model(), groups)
    saved = whole.state()
    module = model(absent)
    inner, named = trained(module, groups)
    assert [group["weight_decay"] for group in inner.param_groups] == [0.5, 0.0]
    for state in (saved, with_numbers(saved)):
        named.load(state)
        assert averages(inner, module) == {n: v for n, v in {"a": 0.1, "b": 0.2, "c": 0.3}.items() if n not in absent}
    assert named.state()["param_groups"] == saved["param_groups"]


def test_an_optimizer_that_makes_its_state_at_once_keeps_none_for_absent_parameters():
    _, named = trained(model(("a",)), [(["a", "b", "c"], {})], torch.optim.Adagrad)
    assert set(named.state()["state"]) == {"b.weight", "c.weight"}


def test_numbers_are_those_of_pytorch():
    inner, named = trained(model(), [(["c", "a"], {}), (["b"], {})])
    assert str(with_numbers(named.state())) == str(inner.state_dict())


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([(["a", "b", "c"], {})], "has 2 parameter groups, but configure_optimizers gives 1"),
        ([(["a"], {}), (["b", "c"], {})], "Group 0 of the checkpoint's optimizer .* differ in b.weight"),
        ([(["a", "b"], {}), ([], {})], "Group 1 of the checkpoint's optimizer .* differ in c.weight"),
    ],
)
def test_other_groups_are_refused(groups, words):
    _, saved = trained(model(), [(["a", "b"], {}), (["c"], {})])
    _, other = trained(model(), groups)
    with pytest.raises(ValueError, match=f"{words}.*Use the same configure_optimizers"):
        other.load(saved.state())


def test_a_plain_state_of_other_groups_is_refused():
    _, saved = trained(model(), [(["a", "b"], {}), (["c"], {})])
    _, other = trained(model(), [(["a", "b", "c"], {})])
    with pytest.raises(ValueError, match="holds 3 parameters in 2 groups, but configure_optimizers gives 3 in 1"):
        other.load(with_numbers(saved.state()))
