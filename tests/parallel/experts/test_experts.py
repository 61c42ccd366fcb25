"""Experts of one's own: what tokens get, and the gradients, are those of a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.blocks import compile_blocks, recompute_in_backward
from flowtrain_lightning.parallel.experts.expert_counts import balance_experts, counting_choices
from flowtrain_lightning.parallel.experts.experts import (
    ExpertExchange,
    counts_of,
    grouped_product,
    number_of_experts,
    set_exchange,
)
from tests.exactness.mixture import CHOSEN, EXPERTS, MixtureBlock, Perceptrons
from tests.tiny import WIDTH


def perceptron(experts, number, row):
    return experts.narrow[number] @ (experts.widen[number] @ row + experts.bias[number]).tanh()


def gradients(experts, output):
    experts.zero_grad()
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return {name: weight.grad.clone() for name, weight in experts.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 7])
def test_every_token_passes_the_experts_that_it_chose(tokens):
    torch.manual_seed(1)
    experts = Perceptrons()
    hidden, shares = torch.randn(tokens, WIDTH), torch.rand(tokens, CHOSEN)
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(tokens)])  # nobody chooses the last
    rows = [
        sum(share * perceptron(experts, number, row) for number, share in zip(numbers.tolist(), shared, strict=True))
        for row, numbers, shared in zip(hidden, chosen, shares, strict=True)
    ]
    found, expected = experts(hidden, chosen, shares), torch.stack(rows)
    torch.testing.assert_close(found, expected)
    of_found, of_expected = gradients(experts, found), gradients(experts, expected)
    torch.testing.assert_close(of_found, of_expected)
    assert not of_found["widen"][-1].any()


def test_no_tokens_pass_experts_too():
    experts = Perceptrons()
    nothing = torch.empty(0, CHOSEN)
    output = experts(torch.empty(0, WIDTH), nothing.long(), nothing)
    assert output.shape == (0, WIDTH)
    assert not any(gradient.any() for gradient in gradients(experts, output).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_groups_without_rows_have_a_product_too(dtype):
    rows, weights = torch.randn(5, 16, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
    found = grouped_product(rows, weights, torch.tensor([0, 5, 5], dtype=torch.int32))
    torch.testing.assert_close(found, rows @ weights[1].T)
    nothing = grouped_product(rows[:0], weights, torch.zeros(3, dtype=torch.int32))
    assert nothing.shape == (0, 8)


def test_the_bias_of_an_expert_follows_how_full_it_was_and_says_who_is_chosen_alone():
    experts = Perceptrons(balance=0.3)
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]] * 3, requires_grad=True)
    assert experts.choose(scores, CHOSEN).tolist() == [[0, 1]] * 3
    chosen, hidden = experts.choose(scores, CHOSEN), torch.randn(3, WIDTH)
    with counting_choices(True):
        experts(hidden, chosen, scores.gather(-1, chosen))
    experts(hidden, chosen, scores.gather(-1, chosen))  # of no step that trains
    told = []
    balance_experts(experts.modules(), lambda counts: told.append(counts.tolist()))
    assert told == [[3, 3, 0, 0]]
    assert experts.balance.raised.tolist() == [-1, -1, 1, 1]
    assert experts.choose(scores, CHOSEN).tolist() == [[2, 3]] * 3
    balance_experts(experts.modules(), lambda counts: None)  # without a batch
    assert experts.state_dict()["balance.raised"].tolist() == [-1, -1, 1, 1]
    assert not experts.choose(scores, CHOSEN).requires_grad


def test_experts_that_do_not_train_keep_their_biases():
    experts = Perceptrons(balance=0.3).requires_grad_(False)
    with counting_choices(True):
        experts(torch.randn(1, WIDTH).requires_grad_(), torch.tensor([[0, 1]]), torch.ones(1, CHOSEN))
    balance_experts(experts.modules(), lambda counts: None)
    assert not experts.balance.raised.any()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureBlock(WIDTH, alike=False, balance=0.1) for _ in range(2))

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows, torch.tensor([0, 4, 9], dtype=torch.int32), 5, True)
        return rows


def computed_by(recompute, group, compiles):
    """Gradients of a stack of layers, and how many tokens chose each expert."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    stack = Stack().double()
    for layer in stack.layers:
        set_exchange(layer.experts, ExpertExchange(group))
        recompute_in_backward(layer, recompute)
    if compiles:
        compile_blocks(stack, backend="aot_eager")
    with counting_choices(True):
        loss = stack(torch.randn(9, WIDTH, dtype=torch.float64)).square().sum()
    loss.backward()
    gradients = {name: weight.grad for name, weight in stack.named_parameters()}
    return gradients, [counts_of(layer.experts).chosen.tolist() for layer in stack.layers]


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_whose_experts_are_divided_compute_the_same_when_they_are_compiled(tmp_path, recompute):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        found, expected = (computed_by(recompute, dist.group.WORLD, compiles) for compiles in (True, False))
    finally:
        dist.destroy_process_group()
    assert found[1] == expected[1]
    assert all(gradient is None or gradient.equal(expected[0][name]) for name, gradient in found[0].items())


def test_experts_without_memory_for_all_that_chose_them_say_how_many_did(tmp_path):
    def without_memory(rows, ends):
        raise torch.OutOfMemoryError("Tried to allocate 9 GiB.")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory: 3 rows chose them, .* sent 3 rows.* 9 GiB"):
            ExpertExchange(dist.group.WORLD)(torch.ones(3, 2), torch.tensor([3, 3], dtype=torch.int32), without_memory)
    finally:
        dist.destroy_process_group()


def test_a_class_without_a_method_to_compute_says_what_is_missing():
    class Nothing(flow.Experts):
        pass

    experts = Nothing(EXPERTS)
    assert number_of_experts(experts) == EXPERTS
    with pytest.raises(NotImplementedError, match="Nothing must define compute"):
        experts(torch.empty(0, WIDTH), torch.empty(0, CHOSEN).long(), torch.empty(0, CHOSEN))
