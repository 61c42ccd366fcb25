"""Plans that a practitioner would run: what none of them may do, and what may never make one worse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from flowtrain_lightning.allocator import DEVICES, Cluster, ModelledCosts, SearchSpace
from flowtrain_lightning.allocator.candidates import (
    candidates,
    data_degrees,
    families_of,
    usable_bytes,
    why_undividable,
)
from flowtrain_lightning.allocator.memory_use import memory_use
from flowtrain_lightning.allocator.placements import colocated_plan, separate_plans
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.allocator.role_time import role_time
from tests.allocator.problems import problems


def families(model, devices, role="backbone", **settings):
    return list(families_of(problems(model, devices=devices, **settings)[role], SearchSpace()))


def timed(model, devices, samples_of_each=8, **degrees):
    problem = problems(model, devices=devices, global_batch_size=samples_of_each * devices)["backbone"]
    family = Family(np.array([float(devices)]), **degrees)
    return float(role_time(problem, family).total[0])


def test_tensor_ranks_divide_the_key_value_heads():
    assert max(family.tensor for family in families("qwen3-vl-30b-a3b", 8)) == 4
    reason = why_undividable(problems("qwen3-vl-30b-a3b")["backbone"], 8, 1, 1)
    assert reason == "The backbone's key-value heads, 4, cannot be divided among 8 tensor ranks."


def test_context_ranks_divide_the_heads_of_a_tensor_rank():
    backbone = problems("qwen2.5-vl-7b", token_budget=65536)["backbone"]  # 28 heads, 4 of keys and values
    assert {degree for degree in range(1, 9) if why_undividable(backbone, 1, 1, degree) is None} == {1, 2, 4, 7}
    assert why_undividable(backbone, 4, 1, 7) is None
    assert why_undividable(backbone, 1, 1, 8) == (
        "The backbone's attention heads, 28, cannot be shared by 8 context ranks: each computes whole heads; take a "
        "context degree of 7 or 14."
    )
    assert "4 tensor x 2 context ranks" in why_undividable(backbone, 4, 1, 2)


def test_stages_need_not_divide_the_layers_but_each_has_one():
    assert {family.pipeline for family in families("qwen2.5-vl-7b", 64)} == {1, 2, 4, 8, 16}  # 28 layers
    assert "28 layers cannot be divided among 32" in why_undividable(problems("qwen2.5-vl-7b")["backbone"], 1, 32, 1)


def test_short_samples_are_not_shared_among_context_ranks():
    assert {family.context for family in families("qwen2.5-vl-7b", 64)} == {1}
    long = problems("qwen2.5-vl-7b", devices=64, token_budget=65536)["backbone"]
    long = replace(long, load=replace(long.load, lengths=np.array([65536])))
    assert {family.context for family in families_of(long, SearchSpace())} == {1, 2, 4}  # 28 heads


def test_full_sharding_over_thousands_of_ranks_is_slower_than_over_hundreds():
    flat = [timed("qwen2.5-vl-7b", devices, shard="fsdp") for devices in (64, 512, 4096)]
    assert flat[0] < flat[1] < flat[2]
    assert flat[2] > 1.2 * flat[0]


def test_over_thousands_of_ranks_weights_are_sharded_by_groups():
    assert timed("qwen2.5-vl-7b", 4096, shard="fsdp", group=8) < 0.9 * timed("qwen2.5-vl-7b", 4096, shard="fsdp")


def test_hybrid_shards_take_more_memory_than_flat_ones_and_less_than_whole_copies():
    problem, one = problems("qwen2.5-vl-7b", devices=64)["backbone"], np.array([1.0])
    data = np.array([64.0])
    layouts = (Family(data, shard="fsdp"), Family(data, shard="fsdp", group=8), Family(data))
    flat, hybrid, whole = (float(memory_use(problem, family, one, one).total[0]) for family in layouts)
    assert flat < hybrid < whole


def test_full_sharding_keeps_sixteen_bytes_a_parameter_and_no_second_copy():
    problem, one = problems("qwen2.5-vl-7b", devices=4096)["backbone"], np.array([1.0])

    def kept(data):
        use = memory_use(problem, Family(np.array([data]), shard="fsdp"), one, one)
        return float((use.weights + use.gradients + use.states)[0])

    assert (kept(8.0) - kept(4096.0)) / (1 / 8 - 1 / 4096) == pytest.approx(16 * problem.half.parameters, rel=1e-6)


def test_a_seventy_two_billion_model_fits_on_eight_cards_of_180_gb():
    costs = ModelledCosts(problems("qwen2.5-vl-72b", devices=8, device="b200"))
    assert costs.plans()


def test_a_loss_in_chunks_leaves_room():
    whole, chunked = (problems("qwen2-vl-2b", loss_chunk=tokens)["backbone"] for tokens in (8192, 1024))
    tokens, one = np.array([8192.0]), np.array([1.0])
    uses = [float(memory_use(problem, Family(one), tokens, one).total[0]) for problem in (whole, chunked)]
    assert uses[0] - uses[1] == pytest.approx(12 * 7 * 1024 * 151936)


def test_no_collective_of_a_candidate_takes_longer_than_its_computing():
    encoder = problems("qwen3-vl-30b-a3b", devices=64)["encoder"]
    table = candidates(encoder, SearchSpace())
    for number in range(0, len(table), 37):
        time = table.candidate(number).details(encoder).time
        assert time.exchange[0] <= time.forward[0] + time.backward[0]


@pytest.mark.parametrize(("model", "devices"), [("qwen2.5-vl-7b", 64), ("internvl3-78b", 512)])
def test_plans_leave_no_device_out_where_that_costs_little(model, devices):
    for plan in ModelledCosts(problems(model, devices=devices, global_batch_size=4 * devices)).plans():
        assert plan.devices == devices


def test_roles_on_several_nodes_share_one_only_by_powers_of_two():
    backbone = problems("smolvlm-2.2b", devices=32)["backbone"]
    assert set(data_degrees(backbone, 1)) == {1, 2, 4, 8, 16, 24, 28, 30, 31, 32}
    assert set(data_degrees(problems("smolvlm-2.2b", devices=8)["backbone"], 1)) == set(range(1, 9))


def test_of_layouts_that_are_as_fast_one_with_memory_to_spare_is_taken():
    costs = ModelledCosts(problems("qwen2.5-vl-7b", devices=64, global_batch_size=512))
    uniform = next(plan for plan in costs.plans(runs_plainly) if plan.kind == "uniform")
    assert uniform.peak_bytes < 0.9 * usable_bytes(costs.problems.cluster)
    assert all(one.layout.shard == "fsdp" for one in uniform.chosen.values())


def runs_plainly(role, layout):
    return layout.shard in ("replicate", "fsdp") and layout.ranks == layout.data


def fastest(device):
    """Seconds of plans of two kinds on 16 devices, however complicated."""
    given = problems("qwen2.5-vl-7b", devices=16)
    given = given.on(Cluster(device, 16, 8))
    tables = {role: candidates(one, SearchSpace()) for role, one in given.items()}
    return [plan.seconds for plan in (colocated_plan(given, tables), *separate_plans(given, tables))]


@pytest.mark.parametrize(("field", "times"), [("memory", 1.5), ("link", 2.0), ("network", 2.0)])
def test_more_memory_and_faster_links_never_make_the_best_plan_slower(field, times):
    device = DEVICES["h100"]
    better = replace(device, **{field: times * getattr(device, field)})
    for now, before in zip(fastest(better), fastest(device), strict=True):
        assert now <= before * (1 + 1e-9)


@pytest.mark.parametrize("degrees", [{"shard": "fsdp"}, {"shard": "fsdp", "group": 8}, {"shard": "zero1"}, {}])
def test_twice_the_devices_and_samples_never_make_a_device_faster(degrees):
    seconds = [timed("qwen2.5-vl-7b", devices, **degrees) for devices in (16, 32, 64, 128, 256, 512)]
    for fewer, more in pairwise(seconds):
        assert more >= fewer / 1.02
