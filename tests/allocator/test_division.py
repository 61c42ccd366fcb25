"""What tensor ranks divide of a backbone, and of a tower whose perceptrons alone they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator.division import Division, division, parameters_of_rank, share_of_rank
from flowtrain_lightning.allocator.module_parts import Dense, Layers
from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.role_problem import Family
from tests.allocator.problems import problems

ONE = np.ones(1)


def half(role, model="qwen2.5-vl-7b"):
    return problems(model)[role].half


def test_tensor_ranks_share_all_of_a_backbone_evenly():
    assert share_of_rank(half("backbone"), 4) == pytest.approx(1 / 4)


def test_of_a_tower_each_rank_has_attention_and_all_that_is_around_the_layers():
    tower = half("encoder")
    (layers, *_) = tower.layers
    perceptron = 3 * layers.hidden * layers.feed_forward
    assert parameters_of_rank(tower, layers, 2) == layers.parameters - layers.count * perceptron / 2
    for part in tower.parts:
        if isinstance(part, Dense):
            assert parameters_of_rank(tower, part, 2) == part.parameters


def test_a_perceptron_whose_width_cannot_be_divided_stays_whole():
    tower = half("encoder")  # 3,420 wide
    assert division(tower, tower.layers[0], 4) == Division(attention=1, feed_forward=4)
    assert division(tower, tower.layers[0], 8) == Division(attention=1, feed_forward=1)
    assert share_of_rank(tower, 8) == 1


def test_a_vocabulary_that_cannot_be_divided_stays_whole():
    uneven = Dense(64, 1001)
    assert parameters_of_rank(half("backbone"), uneven, 2) == uneven.parameters


def test_a_tower_gains_less_from_tensor_ranks_than_one_that_is_divided_whole():
    encoder = problems("internvl3-78b")["encoder"]
    encoder = replace(encoder, half=replace(encoder.half, parts=tuple(map(with_even_heads, encoder.half.parts))))
    divided = replace(encoder, half=replace(encoder.half, perceptrons_only=False))
    tokens = np.array([8192.0])
    whole, perceptrons, everything = (
        float(pass_time(problem, Family(ONE, tensor=tensor), tokens).forward[0])
        for problem, tensor in ((encoder, 1), (encoder, 4), (divided, 4))
    )
    assert everything < perceptrons < whole


def with_even_heads(part):
    return replace(part, heads=24, key_value_heads=24) if isinstance(part, Layers) else part
