"""Time of a role's part of a step: what makes it longer or shorter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.role_problem import PRECISIONS, Family
from flowtrain_lightning.allocator.role_time import role_time
from flowtrain_lightning.allocator.sharing_time import accumulated_bytes, sharing_time
from tests.allocator.problems import problems

PROBLEMS = problems(devices=64)


def timed(role="backbone", problem=None, **degrees):
    family = Family(np.array([float(degrees.pop("data", 8))]), **degrees)
    return role_time(problem or PROBLEMS[role], family)


def linked(share):
    """The backbone where links within a node have a share of their speed."""
    problem = PROBLEMS["backbone"]
    device = replace(problem.cluster.device, link=problem.cluster.device.link * share)
    return replace(problem, cluster=replace(problem.cluster, device=device))


def test_the_parts_add_up():
    time = timed(data=4, tensor=2, pipeline=2, shard="zero1")
    assert sum(time.at(0).values()) == pytest.approx(float(time.total[0]))
    assert all(seconds >= 0 for seconds in time.at(0).values())


def test_ranks_share_the_microbatches_that_a_step_fills():
    filled = problems(devices=64, microbatches=32)["backbone"]
    assert [float(timed(problem=filled, data=data).microbatches[0]) for data in (8, 12, 64)] == [4, 3, 1]


def test_a_family_is_timed_as_its_members_are():
    data = np.array([1.0, 3.0, 8.0, 30.0])
    together = role_time(PROBLEMS["backbone"], Family(data, 2, shard="fsdp")).total
    assert together == pytest.approx([timed(data=one, tensor=2, shard="fsdp").total[0] for one in data])


def test_a_sample_that_fills_the_budget_is_one_microbatch_whatever_it_costs():
    lengths = np.array([8192] + [1024] * 63)
    problem = replace(PROBLEMS["backbone"], load=replace(PROBLEMS["backbone"].load, lengths=lengths, items=64))
    time = timed(problem=problem, data=64)
    assert problem.unevenness(np.array([64.0]))[0] > 5
    assert time.microbatches[0] == 1
    assert time.tokens[0] == pytest.approx(lengths.mean())
    even = replace(problem, load=replace(problem.load, lengths=np.full(64, round(lengths.mean()))))
    assert time.forward[0] > 4 * timed(problem=even, data=64).forward[0]


def test_microbatches_are_as_many_as_samples_that_are_not_cut_need():
    lengths = np.full(64, 5000)  # of which a budget of 8,192 holds one
    problem = replace(PROBLEMS["backbone"], load=replace(PROBLEMS["backbone"].load, lengths=lengths, items=64))
    assert timed(problem=problem, data=8).microbatches[0] == 8


def test_twice_the_data_ranks_take_about_half_the_time():
    assert timed(data=8).forward[0] == pytest.approx(timed(data=4).forward[0] / 2, rel=0.05)


def test_computing_takes_at_least_what_the_peak_allows():
    for role, problem in PROBLEMS.items():
        time, peak = timed(role, data=8), problem.cluster.device.peak
        assert float((time.forward + time.backward)[0]) > problem.model_flops / 8 / peak
        assert float(time.total[0]) < 5 * problem.model_flops / 8 / peak


def test_a_backward_is_two_forwards_and_recomputing_adds_one():
    whole = problems(devices=64, loss_chunk=8192)["backbone"]
    plain, again = timed(data=8, problem=whole), timed(data=8, problem=whole, recompute="full")
    assert plain.backward[0] / plain.forward[0] == pytest.approx(2, rel=0.06)
    head = pass_time(whole, Family(np.array([8.0])), plain.tokens).ends / 3 * plain.microbatches
    assert (again.backward - plain.backward)[0] == pytest.approx((plain.forward - head)[0], rel=0.01)


def test_a_loss_in_chunks_makes_logits_twice():
    in_chunks, at_once = (problems(devices=64, loss_chunk=tokens)["backbone"] for tokens in (1024, 8192))
    there, back = (
        getattr(timed(problem=in_chunks), part)[0] / getattr(timed(problem=at_once), part)[0]
        for part in ("forward", "backward")
    )
    assert there == pytest.approx(1)
    assert 1.02 < back < 1.10


def test_a_frozen_encoder_has_no_backward_and_nothing_to_reduce():
    time = timed(problem=problems(frozen=("encoder",))["encoder"], data=2).at(0)
    assert time["backward"] == time["reduction"] == time["optimizer"] == 0


def test_a_frozen_backbone_still_passes_gradients_to_the_encoder():
    passing = timed(problem=problems(frozen=("backbone",))["backbone"], data=8)
    assert 0.5 < passing.backward[0] / timed(data=8).backward[0] < 0.7  # attention and norms have no weights to skip


def test_a_pipeline_waits_for_its_first_and_last_microbatch():
    time = timed(data=2, pipeline=4)
    busy = (time.forward + time.backward + time.exchange)[0]
    assert time.bubble[0] / busy == pytest.approx(3 / time.microbatches[0], rel=0.05)
    assert timed(data=2).bubble[0] == 0


@pytest.mark.parametrize("shard", ["replicate", "zero1", "zero2", "fsdp"])
def test_a_stage_hides_no_exchange_behind_the_computing_of_other_stages(shard):
    """A fourth of the layers exchange a fourth, behind a fourth of the computing."""
    problem, tokens = linked(0.02), np.array([8192.0])
    problem = replace(problem, half=replace(problem.half, parts=problem.half.layers))
    whole, staged = (Family(np.array([8.0]), 1, stages, shard=shard) for stages in (1, 4))
    times = [
        sharing_time(problem, family, pass_time(problem, family, tokens), np.array([4.0])) for family in (whole, staged)
    ]
    for part in ("forward", "backward", "end"):
        once, stage = (float(np.ravel(getattr(time, part))[0]) for time in times)
        assert once / 4 * (1 - 1e-9) <= stage <= once / 2


def added(precision, shard, microbatches):
    """Bytes that a microbatch's backward moves to have the gradients of a weight added up, in the mean of a step."""
    family = Family(np.array([8.0]), shard=shard)
    return float(accumulated_bytes(PRECISIONS[precision], family, np.array([float(microbatches)]))[0])


@pytest.mark.parametrize("shard", ["replicate", "zero1", "deepspeed-1"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_whole_copies_add_gradients_up_by_the_bytes_that_autograd_moves(precision, shard):
    first, second = moved_by_autograd(precision)
    assert added(precision, shard, 1) == first
    assert added(precision, shard, 2) == (first + second) / 2


def moved_by_autograd(precision):
    """Bytes per weight that the first and the second backward of a step move beside the product with the gradient."""
    half = torch.bfloat16
    layer = nn.Linear(64, 32, bias=False, dtype=half if precision == "bf16-true" else torch.float32)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", half, enabled=precision == "bf16-mixed"):
            loss = layer(torch.ones(4, 64, dtype=layer.weight.dtype)).sum()
        with Moved(layer.weight.shape) as moved:
            loss.backward()
        found.append(moved.size / layer.weight.numel())
    return found


class Moved(TorchDispatchMode):
    """Counts the bytes of operands and results as large as a weight, but of products and views."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.size = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.detach.default):
            whole = [one for one in (*args, result) if isinstance(one, Tensor) and one.shape == self.shape]
            self.size += sum(one.numel() * one.element_size() for one in whole)
        return result


@pytest.mark.parametrize("shard", ["zero2", "deepspeed-2", "fsdp"])
def test_ranks_that_scatter_gradients_add_up_their_shares_alone(shard):
    once = 0 if shard == "fsdp" else 2 + 4
    assert added("bf16-mixed", shard, 1) == once
    assert added("bf16-mixed", shard, 4) == pytest.approx(once + 3 / 4 * 12 / 8)


def test_the_product_adds_to_gradients_that_are_wider_than_their_weights():
    assert added("bf16-master", "replicate", 4) == 0


def test_what_does_not_train_adds_up_nothing():
    family, tokens = Family(np.array([8.0])), np.array([8192.0])
    for frozen in ((), ("backbone",)):
        problem = problems(devices=64, frozen=frozen)["backbone"]
        once, many = (
            sharing_time(problem, family, pass_time(problem, family, tokens), np.array([count])) for count in (1.0, 4.0)
        )
        assert bool(once.backward[0] < many.backward[0]) == (not frozen)
        assert once.forward[0] == many.forward[0]


def test_slow_links_slow_what_passes_over_them():
    slow = linked(0.25)
    assert timed(tensor=4, problem=slow).exchange[0] > 2 * timed(tensor=4).exchange[0]
    assert timed(tensor=1, problem=slow).exchange[0] == timed(tensor=1).exchange[0] == 0


def test_measured_shares_of_the_peaks_replace_assumed_ones():
    problem = PROBLEMS["backbone"]
    halved = replace(problem, efficiency=replace(problem.efficiency, dense=problem.efficiency.dense / 2))
    assert timed(problem=halved).forward[0] > 1.6 * timed().forward[0]


def test_samples_are_dealt_whole():
    problem = problems(global_batch_size=4)["backbone"]
    alone, shared = timed(problem=problem, data=4), timed(problem=problem, data=3)
    assert shared.tokens[0] * shared.microbatches[0] >= alone.tokens[0] * alone.microbatches[0] * 0.99
