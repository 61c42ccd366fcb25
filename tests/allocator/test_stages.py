"""A stage as a role of its own: together they are the role, and one of them is as long as predicted."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.module_parts import Dense, Embedding
from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.role_problem import family_of
from flowtrain_lightning.allocator.stage_layers import layers_of_chunks
from flowtrain_lightning.allocator.stages import (
    chunk_of_problem,
    half_of_chunk,
    seconds_between_stages,
    weights_seconds,
)
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from tests.allocator.problems import problems

STAGES = 4
LAYERS = (8, 8, 8, 4)


def test_stages_share_the_layers_and_the_first_and_last_have_what_is_outside():
    problem = problems()["backbone"]
    half, layers = problem.half, layers_of_chunks(problem, StageSchedule(STAGES))
    own = [half_of_chunk(half, stage, layers) for stage in range(STAGES)]
    assert sum(each.parameters for each in own) == half.parameters
    assert tuple(each.depth for each in own) == LAYERS
    assert [any(isinstance(part, Embedding) for part in each.parts) for each in own] == [True, False, False, False]
    assert [any(isinstance(part, Dense) for part in each.parts) for each in own] == [False, False, False, True]


def test_their_times_add_up_to_that_of_the_role():
    problem = problems()["backbone"]
    family, tokens = family_of(Layout(2, pipeline=STAGES)), np.array([4096.0])
    whole = pass_time(problem, family, tokens)
    own = [pass_time(*chunk_of_problem(problem, family, stage, LAYERS, 8), tokens) for stage in range(STAGES)]
    assert sum(each.forward[0] for each in own) == pytest.approx(whole.forward[0])
    assert sum(each.backward[0] for each in own) == pytest.approx(whole.backward[0])
    assert max(each.total for each in own) < 1.02 * whole.total / STAGES, "of whole layers, none has much more to do"


def test_about_half_of_a_backward_is_for_weights_and_less_where_sequences_are_long():
    problem = problems()["backbone"]
    family, tokens = family_of(Layout(2, pipeline=STAGES)), np.array([4096.0])
    own, laid_out = chunk_of_problem(problem, family, 1, LAYERS, 8)
    shares = []
    for length in (64.0, 4096.0):
        pairs = [np.array([length / 2]) for _ in own.half.layers]
        once = pass_time(own, laid_out, tokens, pairs)
        shares.append((weights_seconds(own, laid_out, once, tokens, pairs) / once.backward).item())
    assert 0.5 > shares[0] > 0.35
    assert shares[1] < shares[0]


def test_gradients_flow_into_a_stage_that_is_frozen_where_something_before_it_trains():
    frozen = problems(frozen=["backbone"])["backbone"]
    first, _ = chunk_of_problem(frozen, family_of(Layout(1, pipeline=STAGES)), 0, LAYERS, 8)
    assert first.receives_gradient == frozen.receives_gradient


def test_hidden_states_go_over_the_network_where_a_stage_fills_a_node():
    problem, tokens = problems(devices=16)["backbone"], np.array([8192.0])
    near, far = (seconds_between_stages(problem, family_of(Layout(data, pipeline=2)), tokens) for data in (4, 8))
    assert far > 2 * near
