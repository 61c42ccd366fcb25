"""Planned memory of a batch beside what is counted, for layers as wide as those of Qwen2.5-VL-7B."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks.memory_count import count_batch
from benchmarks.projected import full_media, full_microbatch
from flowtrain_lightning.allocator import Cluster, describe_config, named_device, role_problems, typical_workload
from flowtrain_lightning.allocator.division import division
from flowtrain_lightning.allocator.memory_use import activation_bytes, memory_use
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.models import QwenVLM
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET

FULL = CONFIGS["qwen2.5-vl-7b"]
SHALLOW = {
    **FULL,
    "text_config": {**FULL["text_config"], "num_hidden_layers": 2, "vocab_size": 4096},
    "vision_config": {**FULL["vision_config"], "depth": 4, "fullatt_block_indexes": [3]},
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


CASES = [("backbone", "full", 1), ("encoder", "selective", 1), ("encoder", "selective", 2)]


@pytest.mark.parametrize(("role", "recompute", "tensor"), CASES)
def test_a_batch_is_planned_within_a_tenth_of_what_is_counted(role, recompute, tensor):
    module = describe_config(SHALLOW)
    problem = role_problems(module, typical_workload(module), Cluster(named_device("h100"), 8, 8))[role]
    family = Family(np.array([8.0 / tensor]), tensor, shard="fsdp", recompute=recompute)
    use = memory_use(problem, family, np.array([2048.0]), np.ones(1)).at(0)
    counted = count_batch(
        QwenVLM(SHALLOW), role, full_microbatch(2), full_media(2), sharded=True, recompute=recompute, tensor=tensor
    )
    assert use["activations"] + use["logits"] == pytest.approx(counted.peak, rel=0.1)


SHARDS, RECOMPUTE = ("fsdp", "replicate"), ("none", "selective", "full")
FULL_BATCHES = [
    pytest.param(*case, id="-".join(case), marks=[] if case == ("backbone", "replicate", "none") else pytest.mark.full)
    for case in product(("encoder", "backbone"), SHARDS, RECOMPUTE)
]


@pytest.mark.parametrize(("role", "shard", "recompute"), FULL_BATCHES)
def test_batches_that_fill_their_budget_take_at_most_a_tenth_more_than_planned(role, shard, recompute):
    module = describe_config(SHALLOW)
    problem = role_problems(module, typical_workload(module), Cluster(named_device("h100"), 8, 8))[role]
    budget, batches = ENCODER_BUDGET if role == "encoder" else 8192, float(problem.batches_in_flight)
    family = Family(np.array([8.0]), shard=shard, recompute=recompute)
    use = memory_use(problem, family, np.array([float(budget)]), np.array([batches])).at(0)
    full = full_microbatch(budget // 1024), full_media(budget // 1024)
    counted = count_batch(QwenVLM(SHALLOW), role, *full, sharded=shard == "fsdp", recompute=recompute)
    found = (batches - 1) * counted.saved + counted.peak
    planned = use["activations"] + use["logits"] + use["features"]
    assert 0.9 * planned <= found <= 1.1 * planned


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_a_layer_keeps_on_a_tensor_rank_is_planned_within_a_twentieth(recompute):
    half = describe_config(SHALLOW).backbone
    (part,) = half.layers
    saved = []
    for depth in (2, 4):
        config = {**SHALLOW, "text_config": {**SHALLOW["text_config"], "num_hidden_layers": depth}}
        one = count_batch(
            QwenVLM(config), "backbone", full_microbatch(1), full_media(1), sharded=True, recompute=recompute, tensor=2
        )
        saved.append(one.saved)
    planned = activation_bytes(part, 2, recompute, ranks=division(half, part, 2)) * 1024
    assert planned == pytest.approx((saved[1] - saved[0]) / 2, rel=0.05)
