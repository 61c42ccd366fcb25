"""The layouts that a role may have."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator.candidates import Choices, candidates, families_of
from tests.allocator.problems import problems


@pytest.fixture(scope="module")
def tables():
    return {role: candidates(problem, Choices()) for role, problem in problems(devices=32).items()}


def test_every_candidate_keeps_tensor_ranks_in_a_node_and_fits(tables):
    device = problems()["backbone"].cluster.device
    for table in tables.values():
        for row in range(len(table)):
            one = table.candidate(row)
            assert one.devices <= 32
            assert one.layout.tensor <= device.per_node
            assert one.bytes < device.memory


def test_a_candidates_columns_are_those_of_its_layout(tables):
    problem = problems(devices=32)["backbone"]
    table = tables["backbone"]
    for row in range(0, len(table), 97):
        one = table.candidate(row)
        details = one.details(problem)
        assert one.seconds == pytest.approx(float(details.time.total[0]))
        assert one.bytes == pytest.approx(float(details.memory.total[0]))


def test_encoders_have_no_pipeline_unless_they_share_the_backbones():
    encoder = problems(devices=32)["encoder"]
    assert {family.pipeline for family in families_of(encoder, Choices())} == {1}
    shared = list(families_of(encoder, Choices(), as_backbone=True))
    assert {family.pipeline for family in shared} == {1, 2, 4, 8, 16}
    assert {family.context for family in shared} == {1}


def test_only_what_was_allowed_is_offered():
    backbone = problems("smolvlm-2.2b", devices=8, token_budget=2048)["backbone"]
    only = Choices(tensor=(1,), pipeline=(1,), context=(1,), shard=("replicate",), recompute=("none",))
    table = candidates(backbone, only)
    found = [table.candidate(row).layout for row in range(len(table))]
    assert [(one.data, one.ranks, one.shard) for one in found] == [(d, d, "replicate") for d in range(1, 9)]


def test_heads_that_cannot_be_shared_are_not_shared():
    encoder = problems("internvl3-78b", devices=8)["encoder"]  # 25 heads
    assert {family.tensor for family in families_of(encoder, Choices())} == {1}


def test_no_rank_goes_without_a_sample():
    table = candidates(problems(devices=64, global_batch_size=16)["backbone"], Choices())
    assert max(table.candidate(row).layout.data for row in range(len(table))) <= 16


def test_what_another_one_beats_is_left_out(tables):
    for table in tables.values():
        front = table.undominated
        assert (np.diff(front.devices) > 0).all()
        assert (np.diff(front.seconds) < 0).all()
        for row in range(len(table)):
            cheaper = front.devices <= table.devices[row]
            assert front.seconds[cheaper].min() <= table.seconds[row]
