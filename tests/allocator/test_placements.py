"""Separate roles that wait for each other: the closed form, held against the simulation of the lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.allocator.candidates import SearchSpace, candidates
from flowtrain_lightning.allocator.modelled_plan import waiting_seconds
from flowtrain_lightning.allocator.placements import separate_plans
from flowtrain_lightning.allocator.workload import ENCODER_BATCHES_IN_FLIGHT
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER, Edge
from flowtrain_lightning.packing.simulator import simulate_step
from flowtrain_lightning.packing.step_graph import BatchOf
from flowtrain_lightning.packing.step_work import StepRules, TimedBatch, in_two_passes
from tests.allocator.problems import problems

SECONDS = st.floats(0.01, 10.0)


def simulated(batches, forward, backward, microbatch):
    """Seconds of a step of one encoder rank and one backbone rank, whose batches are all alike."""
    encoding = [TimedBatch(forward, backward, (BatchOf(BACKBONE, 0, number),)) for number in range(batches)]
    work = {BACKBONE: [[TimedBatch(*in_two_passes(microbatch)[:2])] * batches], ENCODER: [encoding]}
    rules = StepRules.separate(work, [Edge(ENCODER, BACKBONE)], in_flight={ENCODER: ENCODER_BATCHES_IN_FLIGHT})
    return simulate_step(work, rules).makespan


@given(st.integers(1, 16), SECONDS, SECONDS, SECONDS)
def test_a_step_of_equal_batches_takes_no_longer_than_the_closed_form(batches, forward, backward, microbatch):
    encoder, backbone = batches * (forward + backward), batches * microbatch
    closed = max(encoder + microbatch, backbone + forward + backward)
    found = simulated(batches, forward, backward, microbatch)
    assert max(encoder, backbone) <= found * (1 + 1e-9)
    assert found <= closed * (1 + 1e-9)
    if microbatch >= forward + backward:
        assert found == pytest.approx(closed)


def test_the_closed_form_is_a_roles_own_time_and_its_waiting():
    per_role = problems("gemma-3-4b", devices=16)
    _, plan = separate_plans(per_role, {role: candidates(problem, SearchSpace()) for role, problem in per_role.items()})
    waits = waiting_seconds(per_role, plan.chosen)
    assert plan.seconds == pytest.approx(max(one.seconds + waits[role] for role, one in plan.chosen.items()))
    times = {role: one.details(per_role[role]).time for role, one in plan.chosen.items()}
    for role, other in (("encoder", "backbone"), ("backbone", "encoder")):
        time = times[other]
        batch = (time.forward + time.backward + time.exchange)[0] / time.microbatches[0]
        assert waits[role] == pytest.approx(batch)
