"""Optimizers of which a rank holds a part: groups that line up, and state that goes from names to numbers and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer, with_names, with_numbers
from flowtrain_lightning.parallel.regions import OptimizerShare, whole


class TwoHalves(nn.Module):
    """Two halves of a few parameters, of which some may be absent."""

    def __init__(self, absent: str | None = None) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2)
        self.backbone = nn.Linear(2, 4)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        if absent is not None:
            getattr(self, absent).to("meta")

    def optimizer(self) -> torch.optim.Optimizer:
        groups = [
            {"params": [self.backbone.weight, self.encoder.weight], "lr": 0.1},
            {"params": [self.encoder.bias], "lr": 0.2, "weight_decay": 0.0},
            {"params": [self.backbone.bias], "lr": 0.3},
        ]
        return torch.optim.AdamW(groups, lr=1.0, weight_decay=0.01)


GROUPS = [["backbone.weight", "encoder.weight"], ["encoder.bias"], ["backbone.bias"]]


def trained(absent: str | None = None) -> tuple[TwoHalves, torch.optim.Optimizer, NamedOptimizer]:
    """A module after a step whose gradients are all ones."""
    torch.manual_seed(0)
    module = TwoHalves(absent)
    optimizer = module.optimizer()
    named = NamedOptimizer(optimizer, module)
    step(optimizer)
    return module, optimizer, named


def step(optimizer: torch.optim.Optimizer) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_parameters_of_an_absent_half_are_dropped_and_emptied_groups_stay():
    _, optimizer, named = trained(absent="encoder")
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0, 1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]
    assert named.groups == GROUPS


@pytest.mark.parametrize("absent", [None, "encoder", "backbone"])
def test_a_group_that_is_added_in_the_course_of_the_run_is_saved_and_loaded_as_well(absent: str | None):
    def grown() -> tuple[torch.optim.Optimizer, NamedOptimizer]:
        module = TwoHalves(absent)
        optimizer = torch.optim.AdamW(module.backbone.parameters())
        named = NamedOptimizer(optimizer, module)
        optimizer.add_param_group({"params": list(module.encoder.parameters()), "lr": 0.5})
        return optimizer, named

    optimizer, named = grown()
    step(optimizer)
    saved = named.state()
    assert [group["params"] for group in saved["param_groups"]] == [
        ["backbone.weight", "backbone.bias"],
        ["encoder.weight", "encoder.bias"],
    ]
    assert saved["param_groups"][1]["lr"] == 0.5
    assert len(saved["state"]) == (4 if absent is None else 2)
    other = grown()[1]
    other.load(saved)
    assert other.state()["state"].keys() == saved["state"].keys()


def test_a_scheduler_moves_every_group_also_an_emptied_one():
    _, optimizer, _ = trained(absent="encoder")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 0.25, lambda _: 0.125])
    assert scheduler.get_last_lr() == [0.05, 0.05, 0.0375]


def test_state_is_by_name_and_tells_of_own_parameters_only():
    _, _, named = trained(absent="encoder")
    state = named.state()
    assert set(state["state"]) == {"backbone.weight", "backbone.bias"}
    assert [group["params"] for group in state["param_groups"]] == GROUPS
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.01, 0.0, 0.01]


def test_parts_of_two_ranks_load_into_one_process_as_if_it_had_trained_alone():
    whole, optimizer, _ = trained()
    parts = [trained(absent=absent)[2].state() for absent in ("encoder", "backbone")]
    joined = {**parts[0], "state": parts[0]["state"] | parts[1]["state"]}
    copy = TwoHalves()
    copy.load_state_dict(whole.state_dict())
    other = copy.optimizer()
    NamedOptimizer(other, copy).load(joined)
    step(optimizer)
    step(other)
    check_equal(dict(copy.named_parameters()), dict(whole.named_parameters()))


def test_a_rank_takes_its_part_of_a_whole_state():
    _, optimizer, named = trained()
    _, part, named_part = trained(absent="encoder")
    step(part)
    named_part.load(named.state())
    numbers = optimizer.state_dict()["state"]
    check_equal(named_part.state()["state"]["backbone.weight"], numbers[0])
    check_equal(named_part.state()["state"]["backbone.bias"], numbers[3])


def test_names_become_numbers_as_pytorch_writes_them_and_names_again():
    _, optimizer, named = trained()
    plain = optimizer.state_dict()
    numbered = with_numbers(named.state())
    assert [group["params"] for group in numbered["param_groups"]] == [[0, 1], [2], [3]]
    assert numbered["param_groups"] == plain["param_groups"]
    check_equal(numbered["state"], plain["state"])
    named_again = with_names(numbered, named.groups)
    assert named_again["param_groups"] == named.state()["param_groups"]
    check_equal(named_again["state"], named.state()["state"])


def test_a_plain_pytorch_state_loads():
    whole, optimizer, _ = trained()
    copy = TwoHalves()
    copy.load_state_dict(whole.state_dict())
    other = copy.optimizer()
    named = NamedOptimizer(other, copy)
    named.load(optimizer.state_dict())
    check_equal(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_that_is_by_name_already_stays_so():
    _, _, named = trained()
    assert with_names(named.state(), named.groups)["state"].keys() == named.state()["state"].keys()


def test_a_state_of_other_groups_is_refused_with_both_numbers():
    _, optimizer, _ = trained()
    module = TwoHalves()
    named = NamedOptimizer(torch.optim.AdamW([module.encoder.weight]), module)
    with pytest.raises(ValueError, match=r"4 parameters in 3 groups.*gives 1 in 1"):
        named.load(optimizer.state_dict())


def test_a_parameter_that_is_not_of_the_module_is_refused():
    stranger = nn.Parameter(torch.zeros(5, 7))
    with pytest.raises(ValueError, match=r"shape \(5, 7\) that is not a parameter of the module"):
        NamedOptimizer(torch.optim.SGD([stranger], lr=0.1), TwoHalves())


def check_equal(one: Any, other: Any) -> None:
    """Nested dictionaries of tensors and numbers are equal, to the bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_equal(one[key], other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


class Reordered(TwoHalves):
    def optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": [self.encoder.weight, self.backbone.weight]}, {"params": [self.encoder.bias]}]
        return torch.optim.AdamW([*groups, {"params": [self.backbone.bias]}])


def test_state_by_name_finds_its_parameters_in_whatever_order_a_group_lists_them():
    module, optimizer, named = trained()
    other = Reordered()
    other_optimizer = other.optimizer()
    NamedOptimizer(other_optimizer, other).load(named.state())
    for half in ("encoder", "backbone"):
        saved = optimizer.state[getattr(module, half).weight]["exp_avg"]
        assert torch.equal(other_optimizer.state[getattr(other, half).weight]["exp_avg"], saved)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda m: [[m.backbone.weight, m.encoder.weight]], "has 3 parameter groups, but configure_optimizers gives 1"),
        (lambda m: [[m.backbone.weight], [m.encoder.weight, m.encoder.bias], [m.backbone.bias]], r"Group 0 .*weight\."),
        (lambda m: [[m.backbone.weight, m.encoder.weight], [m.encoder.bias], []], r"Group 2 .* in backbone\.bias\."),
    ],
)
def test_state_by_name_of_other_groups_is_refused_with_what_differs(groups, words):
    _, _, named = trained()
    module = TwoHalves()
    optimizer = torch.optim.AdamW([{"params": group} for group in groups(module)])
    with pytest.raises(ValueError, match=f"{words}.*Use the same configure_optimizers"):
        NamedOptimizer(optimizer, module).load(named.state())


def shared(rank: int, cut: int) -> tuple[torch.optim.Optimizer, NamedOptimizer]:
    """After a step by one of two ranks that cut the first group's 14 numbers, one behind the other, at ``cut``."""
    torch.manual_seed(0)
    module = TwoHalves()
    optimizer = module.optimizer()
    named = NamedOptimizer(optimizer, module)
    group = optimizer.param_groups[0]
    begin, end = ((0, cut), (cut, 14))[rank]
    flat = torch.cat([weight.detach().flatten() for weight in group["params"]])[begin:end].requires_grad_()
    shares, first = {}, 0
    for weight in group["params"]:
        start, stop = max(first, begin), min(first + weight.numel(), end)
        size = max(stop - start, 0)
        shares[weight] = OptimizerShare(flat, tuple(weight.shape), start - begin, start - first if size else 0, size)
        first += weight.numel()
    group["params"] = [flat]
    named.share(shares)
    step(optimizer)
    return optimizer, named


@pytest.mark.parametrize("cut", [3, 8, 11])
def test_ranks_that_step_shares_of_weights_save_the_whole_state_and_load_their_share(cut: int):
    _, _, alone = trained()
    expected = alone.state()["state"]
    for name in ("backbone.weight", "encoder.weight"):
        found = torch.full(expected[name]["exp_avg"].shape, torch.nan)
        for rank in range(2):
            entries = shared(rank, cut)[1].state()["state"][name]
            assert entries["step"] == 1
            for region, part in entries["exp_avg"].boxes if "exp_avg" in entries else ():
                found[region.within(whole(found.shape))] = part
        check_equal(found, expected[name]["exp_avg"])
    for rank in range(2):
        optimizer, named = shared(rank, cut)
        before = copy.deepcopy(optimizer.state_dict())
        step(optimizer)
        named.load(alone.state())
        check_equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("other", [{}, {"step": torch.tensor(3.0)}])
def test_weights_stepped_unequally_often_are_refused_where_they_share_one_state(other: dict[str, Any]):
    saved = trained()[2].state()
    saved["state"]["encoder.weight"] = {**saved["state"]["encoder.weight"], **other} if other else {}
    with pytest.raises(ValueError, match=r"treated backbone.weight and encoder.weight differently"):
        shared(0, 8)[1].load(saved)
