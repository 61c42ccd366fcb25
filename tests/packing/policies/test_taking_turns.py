"""The turns of a rank of two roles that share weights with other ranks: nobody waits for later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.policies.lockstep import lockstep_order
from flowtrain_lightning.packing.policies.taking_turns import Due, taking_turns
from flowtrain_lightning.runtime.program_of_plan import make_program
from tests.packing.sizes import BUDGETS, RANKS, meeting_of, plan_of, shard_of, sizes_strategy


@given(sizes_strategy(20), RANKS, st.integers(0, 3), st.booleans(), BUDGETS, st.booleans())
def test_no_turn_comes_before_what_it_waits_for(sizes, ranks, kept, trains, budget, pads):
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget)
    for rank in range(ranks):
        meets = {role: meeting_of(ranks) for role in ("backbone", "encoder")[: 1 + pads]}
        shard = shard_of(ranks, ranks, encoder=rank, backbone=rank, meets=meets)
        program = make_program(plan, shard, kept)
        trained = ["backbone", "encoder"] if trains else ["backbone"]
        (lane,) = program.lanes(trained)
        encoder, reading = program.roles["encoder"], program.roles["backbone"]
        left = encoder.works(trains)
        forwarded, computed, held = set(), -1, 0
        for work in lane.works:
            place = work.batch.number
            if work.batch.role == "backbone":
                computed = reading.due[place]
                assert all(number in forwarded for number, at in enumerate(encoder.due) if at <= computed)
                continue
            assert work == left.pop(0)
            held += 0 if encoder.batches[place].recomputes else {"forward": 1, "backward": -1}[work.kind]
            if work.kind == "forward":
                forwarded.add(place)
                assert held <= kept or not trains, "no more activations are kept than may"
            else:
                assert encoder.due[place] <= computed, "its gradients come from that microbatch"
        assert not left
        assert [work for work in lane.works if work.batch.role == "backbone"] == reading.works(trains=True)


def spelled(due: list[int], positions: int, kept: int | None) -> str:
    """Forwards and backwards as F and B, and M for a position; ``kept`` is None where there are no backwards."""
    passes = lockstep_order(due, kept)[0] if kept else [("forward", number) for number in range(len(due))]
    producer = [(Due(kind, due[number]), kind[0].upper()) for kind, number in passes]
    frozen = "" if kept else "".join(work for _, work in producer)
    return frozen + "".join(taking_turns(producer if kept else [], ["M"] * positions))


def test_turns_without_media_are_those_of_the_role_that_reads_alone():
    assert spelled([], 3, kept=4) == "MMM"


def test_ranks_that_encode_at_different_positions_do_so_at_the_same_time():
    """Else each microbatch, which all of them begin together, would wait for the one rank that encodes before it."""
    assert [spelled([position], 4, kept=2) for position in range(4)] == ["FMMMMB"] * 4
    assert [spelled(due, 4, kept=None) for due in ([0, 1, 3], [1, 2, 3])] == ["FFFMMMM"] * 2


@pytest.mark.parametrize(
    ("ahead", "order"), [(1, "F M BF M BF M BF M B"), (2, "FF M BF M BF M M BB"), (3, "FFF M M BF M M BBB")]
)
def test_beyond_the_kept_batches_a_forward_goes_one_microbatch_before_the_latest(ahead, order):
    assert spelled([0, 1, 2, 3], 4, kept=ahead) == order.replace(" ", "")
