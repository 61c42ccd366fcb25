"""Weights that tensor ranks hold whole are compared in the first steps, and modules refused whose plan forgets one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.unlike_ranks import ranks_say

TENSOR = {"tensor": 2}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank says of a module."""
    return ranks_say(tmp_path_factory.mktemp("unlike"))


@pytest.mark.parametrize(
    ("kind", "module", "after"),
    [
        pytest.param("head norm", "backbone.block.head_norm", 0, marks=pytest.mark.full),
        ("one head norm", "backbone.more.*.head_norm", 0),
        pytest.param("adapter", "backbone.more.*.head_norm.first", 1, marks=pytest.mark.full),
    ],
)
def test_a_plan_that_forgets_a_weight_is_refused_with_the_line_to_write(train, kind, module, after):
    for rank in train(kind, "colocated 2", TENSOR):
        assert f'"{module}": "replicated_with_grad_allreduce"' in rank["said"]
        assert len(rank["steps"]) == after


def test_a_plan_that_would_sum_whole_gradients_is_refused_with_the_module(train):
    for rank in train("summed norm", "colocated 2", TENSOR):
        assert "The gradient of 'backbone.block.norm.weight' is equal on all tensor ranks" in rank["said"]
        assert "What 'backbone.block.norm' computes is whole on every rank: leave it out" in rank["said"]
        assert not rank["steps"]


def test_weights_that_start_unlike_are_refused_before_the_first_step(train):
    for rank in train("start", "colocated 2", TENSOR):
        assert "'backbone.more.1.norm.bias' differs between tensor ranks" in rank["said"]
        assert not rank["steps"]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["right", "right tokens"])
@pytest.mark.parametrize("role", [TENSOR, {**TENSOR, "shard": "fsdp"}], ids=["whole copies", "fsdp"])
def test_rounding_is_no_difference(train, kind, role, precision):
    for rank in train(kind, "1+4", role, precision):
        assert not rank["said"]
        assert len(rank["steps"]) == 4
