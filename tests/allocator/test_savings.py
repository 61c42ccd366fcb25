"""Ways to need less memory or time than plain training: experts apart, fp8, adapters, other optimizers, the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import (
    DEVICES,
    PRECISIONS,
    Allocation,
    AllocationError,
    Layout,
    PlanningError,
    SearchSpace,
    named_model,
)
from flowtrain_lightning.allocator.candidates import evaluate, families_of, why_undividable
from flowtrain_lightning.allocator.flops import backward_flops, forward_flops
from flowtrain_lightning.allocator.modelled_plan import given_plan
from flowtrain_lightning.allocator.module_parts import Layers
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.allocator.role_time import role_time
from tests.allocator.problems import problems

MIXTURE = "qwen3-vl-30b-a3b"
LENGTHS = np.array([1000])


def backbone(model="qwen2.5-vl-7b", devices=8, **changed):
    problem = problems(model, devices=devices)["backbone"]
    return replace(problem, precision=replace(problem.precision, **changed))


def evaluated(problem, data=8, **degrees):
    found = evaluate(problem, Family(np.array([float(data)]), **degrees))
    return found.time.at(0), found.memory.at(0)


def test_experts_that_are_divided_are_kept_once_and_the_rest_by_every_rank():
    problem = backbone(MIXTURE)
    experts = sum(part.count * part.expert_parameters for part in problem.half.layers)
    assert experts == 48 * 128 * 3 * 2048 * 768
    (_, whole), (_, divided) = (evaluated(problem, expert=expert) for expert in (1, 8))
    assert whole["gradients"] - divided["gradients"] == pytest.approx(4 * experts * 7 / 8)


def test_tokens_travel_to_divided_experts_whose_weights_need_not_be_gathered():
    problem = backbone(MIXTURE, devices=64)
    (gathered, _), (divided, _) = (evaluated(problem, 64, shard="fsdp", group=8, expert=expert) for expert in (1, 8))
    assert gathered["exchange"] == 0 < divided["exchange"]
    assert divided["sharding"] < 0.5 * gathered["sharding"]


def test_tensor_ranks_divide_experts_too_and_bring_their_own_tokens_to_them():
    problem = backbone(MIXTURE, devices=16)
    (part,) = problem.half.layers
    (alone, whole), (both, divided) = (evaluated(problem, 8, tensor=tensor, expert=8) for tensor in (1, 2))
    per_rank = 48 * 128 * 3 * 2048 * 768 / 8
    attention = 48 * part.attention_parameters + 2 * 151936 * 2048
    assert whole["gradients"] - divided["gradients"] == pytest.approx(4 * (per_rank + attention) / 2, rel=0.01)
    assert both["forward"] == pytest.approx(alone["forward"] / 2, rel=0.3)
    assert both["exchange"] < 2 * alone["exchange"], "half of the rows go to the experts of each rank"


def test_experts_are_divided_among_tensor_ranks_evenly():
    degrees = {(family.tensor, family.expert) for family in families_of(backbone(MIXTURE, devices=64), SearchSpace())}
    assert {(1, 16), (2, 16), (4, 16), (4, 1)} <= degrees
    problem = backbone(MIXTURE, devices=64)
    assert why_undividable(problem, 4, 1, 1, 32) is None
    assert why_undividable(problem, 4, 1, 1, 64).startswith("The backbone's experts, 128, cannot be divided among 64")


def test_only_mixtures_have_expert_ranks():
    found = {
        model: {family.expert for family in families_of(backbone(model, devices=16), SearchSpace())}
        for model in (MIXTURE, "qwen2.5-vl-7b")
    }
    assert found == {MIXTURE: {1, 4, 8, 16}, "qwen2.5-vl-7b": {1}}


def test_an_expert_degree_divides_the_data_ranks():
    assert Layout(data=8, expert=4).describe() == "data 8, expert 4, replicate"
    with pytest.raises(AllocationError, match="8 data ranks that divide experts among 3"):
        Layout(data=8, expert=3)


def test_fp8_products_are_faster_but_not_twice_as_fast():
    plain, fp8 = (evaluated(backbone(products=width), shard="fsdp")[0] for width in (None, 1))
    assert plain["forward"] / 2 < fp8["forward"] < 0.9 * plain["forward"]


def test_fp8_needs_a_device_that_has_it():
    with pytest.raises(PlanningError, match="a100 has no fp8 products"):
        problems(device="a100", precision="transformer-engine")
    assert all(device.peak_float8 is None or device.peak_float8 > device.peak for device in DEVICES.values())


def test_adapters_train_few_parameters_and_spare_the_gradients_of_the_weights():
    module = named_model("llava-1.5-7b").with_frozen("encoder")
    adapted = module.with_adapters(16).backbone
    layers = next(part for part in adapted.parts if isinstance(part, Layers))
    matrices = (4096 + 4096) * 4 + (4096 + 11008) * 3
    assert adapted.trainable_parameters == layers.count * 16 * matrices  # 40 million
    assert adapted.parameters == module.backbone.parameters + adapted.trainable_parameters
    whole, light = (backward_flops(half, LENGTHS).dense for half in (module.backbone, adapted))
    forward = forward_flops(module.backbone, LENGTHS).dense
    assert whole == pytest.approx(2 * forward, rel=0.02)
    assert light == pytest.approx(forward, rel=0.05)


def test_adapters_leave_frozen_weights_without_gradients_and_states():
    module = named_model("qwen2.5-vl-7b").with_adapters(16)
    problem = replace(backbone(frozen=2), half=module.backbone)
    _, memory = evaluated(problem)
    assert memory["weights"] == pytest.approx(2 * problem.half.parameters, rel=0.03)
    assert memory["gradients"] + memory["states"] < 0.02 * memory["weights"] * 6


def test_frozen_weights_that_are_kept_in_bf16_are_not_cast():
    problem = replace(backbone(), half=named_model("qwen2.5-vl-7b").with_adapters(16).backbone)
    kept_wide, kept_in_bf16 = (
        evaluated(replace(problem, precision=replace(problem.precision, frozen=width)))[0]["sharding"]
        for width in (None, 2)
    )
    assert 0 < kept_in_bf16 < 0.02 * kept_wide


def test_adapters_need_a_rank():
    with pytest.raises(PlanningError, match="rank 0"):
        named_model("llava-1.5-7b").with_adapters(0)


@pytest.mark.parametrize("name", PRECISIONS)
def test_moments_in_eight_bits_take_two_bytes_a_parameter(name):
    usual, small = PRECISIONS[name], PRECISIONS[name].with_optimizer("adamw-8bit")
    master = 4 if name == "bf16-master" else 0
    assert usual.with_optimizer("adamw") == usual
    assert small.states == 2 + master


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(PlanningError, match="no optimizer 'sgd'; choose from adamw, adamw-8bit, adamw-offloaded"):
        PRECISIONS["bf16-mixed"].with_optimizer("sgd")


def test_states_on_the_host_need_no_memory_but_time():
    (time, memory), (slower, smaller) = (evaluated(backbone(host_states=host), shard="fsdp") for host in (False, True))
    assert smaller["states"] == 0 < memory["states"]
    assert slower["optimizer"] > 10 * time["optimizer"]


def test_activations_on_the_host_need_little_memory_and_computing_hides_their_copies():
    (time, memory), (_, smaller) = (evaluated(backbone(), offload=where) for where in ("none", "activations"))
    assert time["offload"] == 0
    assert smaller["activations"] < 0.4 * memory["activations"]
    slow = replace(DEVICES["h100"], host=1e9)
    problem = replace(backbone(), cluster=replace(backbone().cluster, device=slow))
    assert role_time(problem, Family(np.array([8.0]), offload="activations")).offload[0] > time["forward"]


@pytest.mark.parametrize("shard", ["deepspeed-1", "deepspeed-2", "deepspeed-3"])
def test_a_given_plan_counts_the_time_of_states_on_the_host_but_not_their_memory(shard):
    layouts = {"encoder": Layout(8), "backbone": Layout(8, shard=shard)}
    usual = Allocation("colocated", layouts, dict.fromkeys(layouts, tuple(range(8))))
    on_host = replace(usual, offload={"backbone": "optimizer"})
    asked = problems()
    plans = [given_plan(asked, allocation) for allocation in (usual, on_host)]
    kept, sent = (plan.chosen["backbone"].details(asked["backbone"]) for plan in plans)
    assert sent.memory.at(0) == {**kept.memory.at(0), "states": 0.0}
    states = 8 * asked["backbone"].half.trainable_parameters / 8  # two moments in float32, divided among eight ranks
    assert plans[0].peak_bytes - plans[1].peak_bytes == pytest.approx(states)
    assert sent.time.optimizer[0] > 10 * kept.time.optimizer[0]
    assert plans[1].allocation(8).offload == on_host.offload


@pytest.mark.parametrize("offload", ["weights", "all"])
def test_a_given_plan_counts_the_time_of_shards_on_the_host_but_not_their_memory(offload):
    layouts = {"encoder": Layout(8), "backbone": Layout(8, shard="fsdp")}
    usual = Allocation("colocated", layouts, dict.fromkeys(layouts, tuple(range(8))))
    asked = problems()
    plans = [given_plan(asked, each) for each in (usual, replace(usual, offload={"backbone": offload}))]
    kept, sent = (plan.chosen["backbone"].details(asked["backbone"]) for plan in plans)
    numbers = asked["backbone"].half.trainable_parameters / 8
    here, away = kept.memory.at(0), sent.memory.at(0)
    assert away["states"] == 0
    assert here["weights"] - away["weights"] == pytest.approx(4 * numbers)  # float32; those of other ranks come and go
    assert here["gradients"] - away["gradients"] == pytest.approx(4 * numbers)
    assert (away["activations"] < here["activations"]) == (offload == "all")
    assert sent.time.optimizer[0] > 10 * kept.time.optimizer[0]
    slow = replace(DEVICES["h100"], host=1e9)
    problem = replace(asked["backbone"], cluster=replace(asked["backbone"].cluster, device=slow))
    there_and_back = 12 * numbers / 1e9  # to the device twice, and gradients from it
    time = role_time(problem, sent.family)
    computing = (time.forward + time.backward) / time.microbatches
    assert time.offload[0] / time.microbatches[0] >= there_and_back - computing[0] > 0
