"""Gradients of a replicated half are summed over its ranks, once, and what nobody used stays None."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from flowtrain_lightning.parallel import ReplicatedHalf, broadcast_half
from flowtrain_lightning.parallel import replicate as replicate_module
from tests.forks import Job, run_jobs

NAMES = ("both", "first", "second", "nobody", "frozen", "double")


def parameters() -> dict[str, nn.Parameter]:
    shapes = dict.fromkeys(NAMES, (2, 3))
    made = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    made["frozen"].requires_grad_(False)
    made["double"] = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    return made


def finish(parameters: Iterable[nn.Parameter], scale: float) -> None:
    half = ReplicatedHalf(list(parameters))
    half.begin_step()
    half.finish_gradients(scale)


def on_two_ranks(folder: Path) -> None:
    """What each of two ranks does; it writes down the gradients and the number of collectives."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    made = parameters()
    made["both"].grad = torch.full((2, 3), 1.0 + rank)
    made["double"].grad = torch.full((4,), 1e-12 * (1 + rank), dtype=torch.float64)
    made[("first", "second")[rank]].grad = torch.full((2, 3), 5.0)
    made["frozen"].grad = torch.full((2, 3), 7.0)
    collectives = count_all_reduces()
    finish(made.values(), 0.5)
    used = len(collectives)
    gradients = {name: parameter.grad for name, parameter in made.items()}
    weight = torch.full((3,), float(rank))
    table = torch.arange(12.0).view(3, 4) + 100 * rank
    scattered = [table.clone().t(), table.clone()[:, ::2]]
    broadcast_half([weight, *scattered])
    split = split_into_small_buckets(rank)
    torch.save(
        {"gradients": gradients, "collectives": used, "weight": weight, "scattered": scattered, "split": split},
        folder / f"rank{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def split_into_small_buckets(rank: int) -> list[torch.Tensor]:
    replicate_module.BUCKET_BYTES = 16
    made = [nn.Parameter(torch.zeros(size)) for size in (3, 5, 1, 2)]
    for number, parameter in enumerate(made):
        parameter.grad = torch.arange(parameter.numel()) + 10.0 * number + rank
    finish(made, 1.0)
    return [parameter.grad for parameter in made]


def count_all_reduces() -> list[Any]:
    seen: list[Any] = []
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original(*args, **kwargs)

    dist.all_reduce = counted
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    job = Job("two ranks", "tests.parallel.test_replicate:on_two_ranks", 2)
    folder = run_jobs(tmp_path_factory.mktemp("replicate"), [job])["two ranks"].check().folder
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_gradients_are_summed_over_ranks_and_scaled(ranks):
    for rank in ranks:
        assert rank["gradients"]["both"].tolist() == [[1.5] * 3] * 2


def test_a_gradient_that_one_rank_has_counts_as_zero_on_the_other(ranks):
    for rank in ranks:
        assert rank["gradients"]["first"].tolist() == [[2.5] * 3] * 2
        assert rank["gradients"]["second"].tolist() == [[2.5] * 3] * 2


def test_what_no_rank_used_keeps_no_gradient(ranks):
    assert all(rank["gradients"]["nobody"] is None for rank in ranks)


def test_frozen_parameters_are_passed_over(ranks):
    assert all(rank["gradients"]["frozen"].tolist() == [[7.0] * 3] * 2 for rank in ranks)


def test_a_gradient_is_summed_in_its_own_precision(ranks):
    for rank in ranks:
        assert rank["gradients"]["double"].tolist() == [1.5e-12] * 4


def test_one_collective_carries_all_gradients_of_a_dtype(ranks):
    assert [rank["collectives"] for rank in ranks] == [2, 2]


def test_gradients_larger_than_a_bucket_go_in_several(ranks):
    for rank in ranks:
        expected = [torch.arange(size) * 2 + 20.0 * number + 1 for number, size in enumerate((3, 5, 1, 2))]
        assert all(map(torch.equal, rank["split"], expected))


def test_weights_are_those_of_the_first_rank(ranks):
    assert all(rank["weight"].tolist() == [0.0] * 3 for rank in ranks)


def test_also_where_they_do_not_lie_in_one_piece(ranks):
    table = torch.arange(12.0).view(3, 4)
    for rank in ranks:
        assert all(map(torch.equal, rank["scattered"], (table.t(), table[:, ::2])))


def test_gradients_are_kept_once():
    """While they are summed they lie in their bucket alone, and afterwards they are parts of it."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        weights = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
        transposed = nn.Parameter(torch.ones(3, 2).t())
        half = ReplicatedHalf([*weights, transposed])
        half.begin_step()
        for number, weight in enumerate(half.parameters):
            weight.grad = torch.full_like(weight, float(number))
        half.send_gradients()
        assert [weight.grad for weight in weights] == [None] * 3
        half.finish_gradients(2.0)
    finally:
        dist.destroy_process_group()
    gradients = [weight.grad for weight in weights]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1
    assert [float(gradient.mean()) for gradient in gradients] == [0.0, 2.0, 4.0]
    assert transposed.grad.stride() == transposed.stride(), "as the weight, whose optimizer steps them by one kernel"


def test_a_rank_alone_scales_its_gradients_without_any_group():
    made = parameters()
    made["both"].grad = torch.ones(2, 3)
    finish(made.values(), 0.25)
    assert made["both"].grad.tolist() == [[0.25] * 3] * 2
    assert made["nobody"].grad is None


def use_layers_unlike(folder: Path, early: bool) -> None:
    """Each rank uses other layers in its last backward than before, and than the other rank; buckets are small."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    replicate_module.BUCKET_BYTES = 16
    rank = dist.get_rank()
    layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(5))
    for layer in layers:
        nn.init.constant_(layer.weight, 0.1)
        nn.init.constant_(layer.bias, 0.2)
    used = [[(0, 1, 2), (2, 3)], [(1, 2), (0, 1)]]  # by rank and backward; nobody uses the last layer
    half = ReplicatedHalf(list(layers.parameters()), early=early)
    half.begin_step()
    for number, names in enumerate(used[rank]):
        x = torch.full((2, 3), 1.0 + number + rank, dtype=torch.float64)
        for name in names:
            x = layers[name](x)
        with half.backward(last=number == 1):
            x.sum().backward()
    half.send_gradients()
    half.finish_gradients(0.5)
    gradients = [parameter.grad for parameter in layers.parameters()]
    torch.save({"gradients": gradients}, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("early", [True, False])
def test_gradients_are_summed_in_or_after_the_last_backward_whatever_each_rank_used(tmp_path, early):
    job = Job("overlap", "tests.parallel.test_replicate:use_layers_unlike", 2, {"early": early})
    done = run_jobs(tmp_path, [job])["overlap"].check()
    first, second = (torch.load(done.folder / f"rank{rank}.pt") for rank in range(2))
    alone = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(5))
    for layer in alone:
        nn.init.constant_(layer.weight, 0.1)
        nn.init.constant_(layer.bias, 0.2)
    for rank, backwards in enumerate([[(0, 1, 2), (2, 3)], [(1, 2), (0, 1)]]):
        for number, names in enumerate(backwards):
            x = torch.full((2, 3), 1.0 + number + rank, dtype=torch.float64)
            for name in names:
                x = alone[name](x)
            (0.5 * x.sum()).backward()
    for parameter, *found in zip(alone.parameters(), first["gradients"], second["gradients"], strict=True):
        for gradient in found:
            assert (gradient is None) == (parameter.grad is None)
            assert gradient is None or torch.allclose(gradient, parameter.grad, rtol=1e-14)


def test_a_weight_that_gets_its_gradient_in_parts_is_refused_where_sums_begin_early():
    """As under reentrant checkpoints, whose backwards run one by one within the backward."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        layer, values = nn.Linear(2, 2), torch.ones(4, 2, requires_grad=True)
        half = ReplicatedHalf(list(layer.parameters()), early=True)
        half.begin_step()
        parts = [checkpoint(layer, part, use_reentrant=True) for part in values.split(2)]
        with pytest.raises(RuntimeError, match="use_reentrant=False"), half.backward(last=True):
            torch.cat(parts).sum().backward()
    finally:
        dist.destroy_process_group()
