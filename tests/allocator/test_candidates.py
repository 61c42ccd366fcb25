"""The layouts that a role may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import SearchSpace
from flowtrain_lightning.allocator.candidates import candidates, families_of
from tests.allocator.problems import problems


@pytest.fixture(scope="module")
def tables():
    return {role: candidates(problem, SearchSpace()) for role, problem in problems(devices=32).items()}


def test_every_candidate_keeps_tensor_ranks_in_a_node_and_fits(tables):
    device = problems()["backbone"].cluster.device
    for table in tables.values():
        for number in range(len(table)):
            one = table.candidate(number)
            assert one.devices <= 32
            assert one.layout.tensor <= device.per_node
            assert one.bytes < device.memory


def test_a_candidates_columns_are_those_of_its_layout(tables):
    problem = problems(devices=32)["backbone"]
    table = tables["backbone"]
    for number in range(0, len(table), 97):
        one = table.candidate(number)
        details = one.details(problem)
        assert one.seconds == pytest.approx(float(details.time.total[0]))
        assert one.bytes == pytest.approx(float(details.memory.total[0]))


def test_encoders_have_no_pipeline_unless_they_share_the_backbones():
    encoder = problems(devices=32)["encoder"]
    assert {family.pipeline for family in families_of(encoder, SearchSpace())} == {1}
    shared = list(families_of(encoder, SearchSpace(), as_backbone=True))
    assert {family.pipeline for family in shared} == {1, 2, 4, 8, 16}
    assert {family.context for family in shared} == {1}


def test_groups_that_share_weights_have_ranks_to_share_them_with():
    backbone = problems("qwen2.5-vl-72b", devices=64)["backbone"]
    grouped = [family for family in families_of(backbone, SearchSpace()) if family.group is not None]
    assert {family.tensor for family in grouped} >= {1, 8}
    assert min(family.group for family in grouped) == 2


def test_only_what_was_allowed_is_offered():
    backbone = problems("smolvlm-2.2b", devices=8, token_budget=2048)["backbone"]
    only = SearchSpace(tensor=(1,), pipeline=(1,), context=(1,), shard=("replicate",), recompute=("none",))
    table = candidates(backbone, only)
    found = [table.candidate(number).layout for number in range(len(table))]
    assert [(one.data, one.ranks, one.shard) for one in found] == [(d, d, "replicate") for d in range(1, 9)]


def test_heads_that_cannot_be_shared_are_not_shared():
    encoder = problems("internvl3-78b", devices=8)["encoder"]  # 25 heads
    divided = replace(encoder, half=replace(encoder.half, perceptrons_only=False))
    assert {family.tensor for family in families_of(divided, SearchSpace())} == {1}
    assert {family.tensor for family in families_of(encoder, SearchSpace())} == {1, 2, 4, 8}


def test_no_rank_goes_without_a_sample():
    table = candidates(problems(devices=64, global_batch_size=16)["backbone"], SearchSpace())
    assert max(table.candidate(number).layout.data for number in range(len(table))) <= 16


def test_the_front_of_devices_and_time_beats_every_candidate(tables):
    for table in tables.values():
        front = table.fastest_by_devices
        assert (np.diff(front.devices) > 0).all()
        assert (np.diff(front.seconds) < 0).all()
        for devices, seconds in zip(table.devices, table.seconds, strict=True):
            assert front.seconds[front.devices <= devices].min() <= seconds


def test_the_front_of_memory_and_time_beats_every_candidate_of_as_many_devices(tables):
    for table in tables.values():
        among = np.flatnonzero(table.devices == 8)
        front = table.fastest_by_memory(among)
        assert (np.diff(table.seconds[front]) >= 0).all()
        assert (np.diff(table.bytes[front]) < 0).all()
        for size, seconds in zip(table.bytes[among], table.seconds[among], strict=True):
            assert table.seconds[front[table.bytes[front] <= size]].min() <= seconds


def test_ranks_that_divide_experts_are_data_ranks_of_one_group_that_shares_weights():
    backbone = problems("qwen3-vl-30b-a3b", devices=128, token_budget=65_536)["backbone"]
    long = replace(backbone, load=replace(backbone.load, lengths=np.full(64, 40_000)))
    families = [family for family in families_of(long, SearchSpace()) if family.group and family.expert > 1]
    assert {family.context for family in families} >= {1, 2, 4}
    for family in families:
        for number in range(len(family.data)):
            layout = family.layout(number)  # which refuses others
            assert layout.data // layout.replicas % family.expert == 0
