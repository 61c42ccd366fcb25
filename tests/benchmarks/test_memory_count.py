"""Bytes counted without a device: shards are as large as their rows, and what is recomputed is not kept."""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks.memory_count import count_batch, count_states
from benchmarks.projected import full_media, full_microbatch
from flowtrain_lightning.allocator import Cluster, Layout, named_device, role_problems, typical_workload
from flowtrain_lightning.allocator.division import division
from flowtrain_lightning.allocator.hf_config import describe_config
from flowtrain_lightning.allocator.memory_use import activation_bytes, memory_use
from flowtrain_lightning.allocator.role_problem import family_of
from flowtrain_lightning.models import QwenVLM
from flowtrain_lightning.parallel.blocks import repeated_blocks
from flowtrain_lightning.parallel.halves import half_parameters
from tests.models.tiny import FAMILIES

PRECISION = "bf16-mixed"
FLOAT32 = 4
BFLOAT16 = 2


def tiny() -> QwenVLM:
    config = copy.deepcopy(FAMILIES["qwen2_5_vl"].config)
    config["vision_config"] |= {"patch_size": 14, "window_size": 56}
    return QwenVLM(config)


def shard_numbers(role: str, ranks: int) -> int:
    """Numbers on the first rank, on which the rows of every weight are rounded up."""
    module = tiny()
    module.configure_model()
    weights = half_parameters(module, role)
    return sum(-(-len(weight) // ranks) * weight[0].numel() for weight in weights)


@pytest.mark.parametrize("role", ["encoder", "backbone"])
def test_a_rank_keeps_its_rows_of_weights_gradients_and_both_moments(role):
    counted = count_states(tiny(), role, Layout(data=4, shard="fsdp"), "none", PRECISION)
    expected = FLOAT32 * shard_numbers(role, 4)
    assert (counted.weights, counted.gradients, counted.optimizer) == (expected, expected, 2 * expected)
    assert counted.gathered > 0


def test_groups_of_two_keep_twice_as_much_as_one_of_four():
    counted = count_states(tiny(), "backbone", Layout(data=4, shard="fsdp", replicas=2), "none", PRECISION)
    assert counted.weights == FLOAT32 * shard_numbers("backbone", 2)


def test_what_a_backward_has_sent_does_not_stay_for_the_next_forward():
    """At a backward's end there are weights outside of blocks, and their gradients in both widths."""
    module = tiny()
    module.configure_model()
    blocks = [block for path in module.halves["encoder"] for block in repeated_blocks(module.get_submodule(path))]
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    outside = sum(weight.numel() for weight in half_parameters(module, "encoder") if id(weight) not in inside)
    counted = count_states(tiny(), "encoder", Layout(data=4, shard="fsdp"), "none", PRECISION)
    assert counted.gathered_at_the_end == pytest.approx((BFLOAT16 + BFLOAT16 + FLOAT32) * outside, rel=0.001)


def test_whole_copies_keep_everything_and_sum_it_in_buckets_of_the_same_size():
    counted = count_states(tiny(), "backbone", Layout(data=4), "none", PRECISION)
    assert counted.weights == FLOAT32 * shard_numbers("backbone", 1)
    assert counted.gathered_at_the_end >= counted.weights


@pytest.mark.parametrize("role", ["encoder", "backbone"])
def test_what_is_computed_again_is_not_kept(role):
    kept = [
        count_batch(tiny(), role, full_microbatch(1), full_media(1), sharded=True, recompute=recompute)
        for recompute in ("full", "selective", "none")
    ]
    assert kept[0].saved < kept[1].saved < kept[2].saved
    assert all(each.saved <= each.peak for each in kept)
    assert all(each.weight_copies == 0 for each in kept), "weights are gathered as they are computed with"


def test_of_whole_copies_the_casts_that_autocast_keeps_are_told_apart():
    counted = count_batch(tiny(), "encoder", full_microbatch(1), full_media(1), sharded=False, recompute="none")
    assert 0 < counted.weight_copies <= FLOAT32 * shard_numbers("encoder", 1) / 2


def test_what_a_batch_keeps_has_no_part_of_the_weights_whose_casts_are_told_apart():
    saved = [
        count_batch(tiny(), "encoder", full_microbatch(1), full_media(images), sharded=False, recompute="full").saved
        for images in (1, 2)
    ]
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.01)


@pytest.mark.full
def test_tensor_ranks_keep_their_share_of_divided_layers_and_of_what_these_leave():
    layouts = Layout(data=2, shard="fsdp"), Layout(data=2, tensor=2, shard="fsdp")
    whole, shared = (count_states(tiny(), "backbone", layout, "none", PRECISION) for layout in layouts)
    assert 0.45 * whole.weights < shared.weights < 0.6 * whole.weights  # norms are whole on every rank
    assert shared.optimizer == 2 * shared.weights
    saved = [
        count_batch(
            tiny(), "backbone", full_microbatch(1), full_media(1), sharded=True, recompute="none", tensor=tensor
        ).saved
        for tensor in (1, 2)
    ]
    assert 0.5 * saved[0] <= saved[1] < 0.9 * saved[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"shard": "fsdp"},
        {},
        {"shard": "fsdp", "replicas": 2},
        {"shard": "fsdp", "tensor": 2},
        {"tensor": 2},
        {"shard": "fsdp", "tensor": 2, "replicas": 2},
    ],
    ids=str,
)
def test_ranks_that_share_experts_hold_what_is_planned_for_them(layout):
    config = FAMILIES["qwen3_vl_moe"].config
    found = count_states(QwenVLM(config), "backbone", Layout(data=4, expert=2, **layout), "none", PRECISION)
    counted = found.weights + found.gradients + found.optimizer
    built = QwenVLM(config)
    built.configure_model()
    module = describe_config(built.model.config.to_dict())
    cluster = Cluster(named_device("h100"), 8, 8)
    problem = role_problems(module, typical_workload(module), cluster, PRECISION)["backbone"]
    family = family_of(Layout(data=4, expert=2, **layout))
    use = memory_use(problem, family, np.ones(1), np.ones(1)).at(0)
    gathered = found.gathered if "shard" in layout else 0  # what planned weights and gradients have of others' shards
    assert counted <= 1.05 * (use["weights"] + use["gradients"] + use["states"])
    assert counted + gathered >= 0.8 * (use["weights"] + use["gradients"] + use["states"])


@pytest.mark.full
def test_experts_that_are_divided_are_not_gathered():
    layouts = (Layout(data=4, expert=expert, shard="fsdp") for expert in (1, 2, 4))
    config = FAMILIES["qwen3_vl_moe"].config
    whole, pairs, all_ranks = (count_states(QwenVLM(config), "backbone", each, "none", PRECISION) for each in layouts)
    assert whole.weights == pairs.weights == all_ranks.weights
    assert all_ranks.gathered < pairs.gathered < whole.gathered


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
def test_a_layer_of_a_mixture_keeps_what_is_planned(recompute, tensor):
    family, saved = FAMILIES["qwen3_vl_moe"].config, []
    text = {**family["text_config"], "hidden_size": 128, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4}
    vision = {**family["vision_config"], "out_hidden_size": 128}
    for layers in (2, 3):
        module = QwenVLM({**family, "text_config": {**text, "num_hidden_layers": layers}, "vision_config": vision})
        batch = full_microbatch(1), full_media(1, vision["patch_size"])
        found = count_batch(module, "backbone", *batch, sharded=True, recompute=recompute, tensor=tensor)
        saved.append(found.saved)
    module.configure_model()
    half = describe_config(module.model.config.to_dict()).backbone
    (part,) = half.layers
    ranks = division(half, part, tensor)
    planned = len(batch[0].tokens) * activation_bytes(part, BFLOAT16, recompute, ranks=ranks)
    assert saved[1] - saved[0] == pytest.approx(planned, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "internvl", "smolvlm"])
def test_a_layer_keeps_what_is_planned_whatever_norms_its_family_has(family, recompute):
    kind, config, saved = FAMILIES[family].kind, copy.deepcopy(FAMILIES[family].config), []
    vision, is_gemma = config["vision_config"], family == "gemma3"
    patch = vision["patch_size"] if isinstance(vision["patch_size"], int) else vision["patch_size"][0]
    config["text_config"] |= {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    config["text_config"].pop("layer_types", None)
    config["text_config"] |= {"sliding_window": 512} if is_gemma else {}
    vision |= {"out_hidden_size": 128} if "out_hidden_size" in vision else {}
    vision |= {"image_size": 32 * patch} if "image_size" in vision else {}
    config |= {"mm_tokens_per_image": 256} if is_gemma else {}
    for layers in (2, 4):
        module = kind({**config, "text_config": {**config["text_config"], "num_hidden_layers": layers}})
        batch = full_microbatch(1), full_media(1, patch)
        saved.append(count_batch(module, "backbone", *batch, sharded=True, recompute=recompute).saved)
    module.configure_model()
    part = describe_config(module.model.config.to_dict()).backbone.layers[0]
    assert saved[1] - saved[0] == pytest.approx(2 * 1024 * activation_bytes(part, BFLOAT16, recompute), rel=0.02)
