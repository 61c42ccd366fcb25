"""What the lanes of an allocation compute can be computed in the order that its ranks keep, whatever the steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.packing.cost_model import CostModel
from flowtrain_lightning.packing.simulator import simulate_steps
from flowtrain_lightning.packing.step_graph import BatchOf, Work
from flowtrain_lightning.packing.step_work import PassTimes
from flowtrain_lightning.placement.lane_work import lane_work
from flowtrain_lightning.placement.simulation import plan_on
from tests.placement.test_simulation import draw_sizes

FOUR_RANKS = {
    "whole copies": Layout(4),
    "fsdp": Layout(4, shard="fsdp"),
    "hsdp": Layout(4, shard="fsdp", replicas=2),
    "zero1": Layout(4, shard="zero1"),
    "tensor": Layout(2, tensor=2),
    "tensor, zero1": Layout(2, tensor=2, shard="zero1"),
    "tensor, fsdp": Layout(2, tensor=2, shard="fsdp"),
}
TWO_RANKS = {
    "whole copies": Layout(2),
    "fsdp": Layout(2, shard="fsdp"),
    "zero1": Layout(2, shard="zero1"),
    "tensor": Layout(1, tensor=2),
}
ALL, FIRST, LAST = (0, 1, 2, 3), (0, 1), (2, 3)


@dataclass(frozen=True)
class EvenCosts:
    """One second for a token or patch in each direction, and one for each end of a step."""

    encoder_trains: bool

    def batch(self, role, lengths):
        seconds = float(lengths.sum())
        return PassTimes(seconds, seconds if role == "backbone" or self.encoder_trains else 0.0)

    def end_of_step(self, role):
        return 1.0, 1.0

    def on_the_way(self, role, lengths):
        return 0.0


RANKS = {"colocated": (ALL, ALL), "mixed": (ALL, FIRST), "separate": (LAST, FIRST)}
OF_SIZE = {4: FOUR_RANKS, 2: TWO_RANKS}
QUICK = [
    ("colocated", "hsdp", "tensor, fsdp"),
    ("colocated", "whole copies", "fsdp"),
    ("colocated", "tensor, zero1", "hsdp"),
    ("mixed", "hsdp", "fsdp"),
    ("mixed", "tensor", "tensor"),
    ("separate", "fsdp", "tensor"),
    ("separate", "whole copies", "zero1"),
]
CASES = QUICK + [
    pytest.param(placement, encoder, backbone, marks=pytest.mark.full)
    for placement, (encoding, others) in RANKS.items()
    for encoder in OF_SIZE[len(encoding)]
    for backbone in OF_SIZE[len(others)]
    if (placement, encoder, backbone) not in QUICK
]


def allocation_of(placement, encoder, backbone):
    named = {"encoder": encoder, "backbone": backbone}
    ranks = dict(zip(named, RANKS[placement], strict=True))
    layouts = {role: OF_SIZE[len(ranks[role])][name] for role, name in named.items()}
    return Allocation(placement, layouts, ranks)


@pytest.mark.parametrize(("placement", "encoder", "backbone"), CASES)
@settings(max_examples=12, deadline=None)
@given(trains=st.booleans(), kept=st.integers(0, 4), samples=st.integers(1, 16), seed=st.integers(0, 2**16))
def test_no_rank_is_ever_stuck(placement, encoder, backbone, trains, kept, samples, seed):
    allocation, cost = allocation_of(placement, encoder, backbone), CostModel(1.0, 0.0, 0.0)
    draw = np.random.default_rng(seed)
    drawn = [draw_sizes(draw, samples) for _ in range(2)]
    plans = [plan_on(allocation, sizes, np.arange(samples), 100, cost, {"encoder": cost}) for sizes in drawn]
    works, rules = lane_work(plans, allocation, EvenCosts(trains), kept)
    done = [(span.step, span.work, span.rank) for span in simulate_steps(works, rules).spans]
    assert len(done) == len(set(done))
    passes = [
        (step, Work(BatchOf(role, member, number), kind), rank)
        for step, work in enumerate(works)
        for role, members in work.items()
        for member, batches in enumerate(members)
        for number, batch in enumerate(batches)
        for kind in (("forward", "backward") if batch.backward else ("forward",))
        for rank in rules.ranks[role][member]
    ]
    assert set(done) == set(passes)


@pytest.mark.parametrize(
    ("layout", "groups"), [("fsdp", [ALL]), ("hsdp", [FIRST, LAST]), ("whole copies", [(rank,) for rank in ALL])]
)
def test_a_shard_group_takes_as_long_for_an_encoder_batch_as_its_slowest_rank(layout, groups):
    sizes, cost = draw_sizes(np.random.default_rng(0), 16), CostModel(1.0, 0.0, 0.0)
    alone, met = (allocation_of("colocated", name, "whole copies") for name in ("whole copies", layout))
    plan = plan_on(alone, sizes, np.arange(16), 100, cost, {"encoder": cost})
    apart, together = (lane_work([plan], one, EvenCosts(True), 4)[0][0]["encoder"] for one in (alone, met))
    assert len({batch.forward for of_rank in apart for batch in of_rank}) > 1
    for group in groups:
        found = [batch for rank in group for batch in apart[rank]]
        for batch in (batch for rank in group for batch in together[rank]):
            others = [other for other in found if other.turn == batch.turn]
            assert batch.forward == max(other.forward for other in others)
            assert batch.backward == max(other.backward for other in others)
