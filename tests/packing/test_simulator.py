"""The rules of a step, one by one, with roles of any name; consecutive steps; the closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import SYNC_EVERY, StepPlan
from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.simulator import closed_form_time, simulate_step, simulate_steps
from flowtrain_lightning.packing.step_graph import BatchOf, BlockedError
from flowtrain_lightning.packing.step_work import PassTimes, StepRules, TimedBatch, step_work
from tests.packing.sizes import make_sizes, meeting_of

EDGES = [Edge("a", "t"), Edge("b", "t")]
"""Two sources, of which most tests have one, and a trunk."""


def made(forward, backward, *readers, **more):
    """A batch that members of the trunk read."""
    return TimedBatch(forward, backward, tuple(BatchOf("t", *reader) for reader in readers), **more)


def step(trunk, a=((),), **sources):
    """Microbatches of these seconds, the trunk's forward and backward in equal parts, and batches of the sources."""
    return {"t": [[TimedBatch(time / 2, time / 2) for time in lane] for lane in trunk], "a": a, **sources}


def makespan(trunk, a, *, colocated=False, meet=True, **rules):
    work = step(trunk, a)
    ranks = {
        role: [(first + lane,) for lane in range(len(work[role]))] for role, first in (("t", 0), ("a", len(trunk)))
    }
    if colocated:
        ranks["a"] = ranks["t"]
    meets = {"t": meeting_of(len(trunk))} if meet else {}
    return simulate_step(work, StepRules(ranks, EDGES, meets=meets, **rules)).makespan


def test_without_media_a_step_takes_what_the_trunk_takes():
    work = step([[1.0, 2.0], [2.0, 1.0]])
    found = simulate_step(work, StepRules.separate(work, EDGES))
    assert (found.makespan, found.work) == (3.0, 3.0)


def test_ranks_that_meet_wait_for_the_slowest_at_every_microbatch():
    assert makespan([[1.0, 2.0], [2.0, 1.0]], [[]]) == 4.0


def test_a_microbatch_waits_for_its_rows_and_a_source_for_their_gradients():
    assert makespan([[4.0]], [[made(1.0, 2.0, (0, 0))]]) == 1.0 + 4.0 + 2.0


def test_a_microbatch_waits_for_the_rows_of_all_sources():
    work = step([[4.0]], a=[[made(1.0, 2.0, (0, 0))]], b=[[made(3.0, 1.0, (0, 0))]])
    assert simulate_step(work, StepRules.separate(work, EDGES)).makespan == 3.0 + 4.0 + 2.0


def test_what_reads_may_be_read_in_its_turn():
    """Rows go on from one role to the next, and gradients come back the whole way."""
    chain = {
        "z": [[TimedBatch(1.0, 1.0)]],
        "t": [[TimedBatch(2.0, 2.0, (BatchOf("z", 0, 0),))]],
        "a": [[made(1.0, 1.0, (0, 0))]],
    }
    found = simulate_steps([chain], StepRules.separate(chain, [Edge("a", "t"), Edge("t", "z")]))
    begins = {(span.work.batch.role, span.work.kind): span.start for span in found.spans}
    assert begins == {
        ("a", "forward"): 0.0,
        ("t", "forward"): 1.0,
        ("z", "forward"): 3.0,
        ("z", "backward"): 4.0,
        ("t", "backward"): 5.0,
        ("a", "backward"): 7.0,
    }
    assert found.step_ends == [7.0]  # of both that read


def test_text_first_and_last_hides_the_source():
    assert makespan([[2.0, 2.0, 2.0]], [[made(1.0, 2.0, (0, 1))]]) == 6.0


def test_a_source_that_does_not_train_has_no_backward():
    batches = [made(1.0, 0.0, (0, position)) for position in range(3)]
    assert makespan([[2.0, 2.0, 2.0]], [batches]) == 1.0 + 6.0


def test_a_limit_of_kept_activations_holds_later_forwards_back():
    batches = [made(1.0, 1.0, (0, position)) for position in range(2)]
    assert makespan([[3.0, 3.0]], [batches]) == 1 + 3 + 3 + 1
    assert makespan([[3.0, 3.0]], [batches], in_flight={"a": 1}) == 1 + 3 + 1 + 1 + 3 + 1


def test_a_rank_of_two_roles_does_one_thing_at_a_time():
    assert makespan([[4.0, 1.0]], [[made(1.0, 2.0, (0, 0))]], colocated=True, meet=False) == 8.0


def test_an_order_that_the_limit_blocks_is_refused():
    batches = [made(1.0, 1.0, (0, 0)), made(1.0, 1.0, (0, 0))]
    with pytest.raises(BlockedError, match="Allow more batches in flight, or mark some as recomputed"):
        makespan([[1.0]], [batches], in_flight={"a": 1})


def test_a_recomputed_batch_keeps_nothing_and_takes_its_forward_twice():
    batches = [made(1.0, 1.0, (0, 0)), made(1.0, 1.0, (0, 0), recomputed=True)]
    # Two forwards, the microbatch, a backward, and forward and backward of the second.
    assert makespan([[4.0]], [batches], in_flight={"a": 1}) == 1 + 1 + 4 + 1 + (1 + 1)


def test_members_that_meet_begin_when_all_of_them_have_their_rows():
    # Rank 0 could begin its microbatch, but would wait there for rank 1, whose rows it has yet to make.
    batches = [[made(2.0, 0.0, (1, 0))], [made(1.0, 0.0, (1, 0))]]
    assert makespan([[1.0], [1.0]], batches, colocated=True) == 2 + 1


def found_spans(work, rules):
    spans = simulate_steps([work], rules).spans
    return {(span.rank, *span.work.batch[::2], span.work.kind): (span.start, span.end) for span in spans}


def test_ranks_of_one_member_do_its_work_together_and_others_by_themselves():
    work = step([[1.0, 1.0], [3.0, 1.0]], [[made(2.0, 1.0, (0, 1))], []])
    found = found_spans(work, StepRules({"t": [(0, 1), (2, 3)], "a": [(0,), (4,)]}, EDGES))
    assert found[0, "t", 0, "forward"] == found[1, "t", 0, "forward"] == (0.0, 0.5)
    assert found[0, "a", 0, "forward"] == (1.0, 3.0)  # meanwhile rank 1 has nothing to do
    assert found[0, "t", 1, "forward"] == found[1, "t", 1, "forward"] == (3.0, 3.5)
    assert found[2, "t", 1, "forward"] == found[3, "t", 1, "forward"] == (3.0, 3.5)
    assert found[0, "a", 0, "backward"] == (4.0, 5.0)


def test_ranks_that_share_a_batch_begin_it_once_all_of_them_are_free():
    work = step([[1.0, 1.0], [2.0, 1.0]], [[made(1.0, 1.0, (0, 1), (1, 1))]])
    found = found_spans(work, StepRules({"t": [(0,), (1,)], "a": [(0, 1)]}, EDGES))
    assert found[0, "a", 0, "forward"] == found[1, "a", 0, "forward"] == (2.0, 3.0)
    assert found[0, "a", 0, "backward"] == found[1, "a", 0, "backward"] == (4.0, 5.0)


BOTH = {"t": [(0,), (1,)], "a": [(0,), (1,)]}
IN_ORDER = StepRules(BOTH, EDGES, in_flight={"a": 1}, meets={"t": meeting_of(2)})


def test_ranks_that_need_each_other_do_their_forwards_first_and_their_backwards_last():
    # Without a fixed order rank 0 would make rows for the second microbatch between the two, and rank 1 wait for it.
    work = step([[1.0, 1.0], [1.0, 1.0]], [[made(1.0, 2.0, (1, 1))], [made(1.0, 2.0, (0, 0))]])
    spans = simulate_steps([work], IN_ORDER).spans
    for rank in (0, 1):
        order = [span.work for span in sorted(spans, key=lambda span: span.start) if span.rank == rank]
        assert [work.kind[0] + work.batch.role for work in order] == ["fa", "ft", "bt", "ft", "bt", "ba"]
    assert max(span.end for span in spans) == 1 + 1 + 1 + 2


def test_a_shard_group_with_a_frozen_source_does_all_of_its_forwards_first():
    batches = [[made(1.0, 0.0, (0, 0)), made(1.0, 0.0, (1, 1))], [made(2.0, 0.0, (1, 0))]]
    work = step([[1.0, 1.0], [1.0, 1.0]], batches)
    assert simulate_steps([work, work], IN_ORDER).step_ends == [2 + 2, 2 * (2 + 2)]


def step_ends(steps, **rules):
    return simulate_steps(steps, StepRules({"t": [(0,)], "a": [(1,)]}, EDGES, **rules)).step_ends


def test_the_trunk_goes_on_while_the_source_still_does_its_backward():
    work = step([[2.0, 3.0]], [[made(1.0, 2.0, (0, 1))]])
    # The second step begins with text at 5 s, the source at 7 s; its rows are there at 8 s.
    assert step_ends([work, work]) == [5.0, 8.0 + 3.0]


def test_a_source_that_does_not_train_works_ahead_into_later_steps():
    work = step([[3.0]], [[made(1.0, 0.0, (0, 0))]])
    assert step_ends([work] * 4, steps_ahead=8) == [4.0, 7.0, 10.0, 13.0]
    assert step_ends([work] * 4, steps_ahead=0) == [4.0, 8.0, 12.0, 16.0]


def test_a_source_works_no_further_ahead_than_it_may():
    quick = step([[1.0]], [[made(4.0, 0.0, (0, 0))]])
    slow = step([[10.0]], [[made(1.0, 0.0, (0, 0))]])
    # At 1 s the third step's rows could be begun at 2 s, but the first step ends at 11 s only.
    assert step_ends([slow, slow, quick], steps_ahead=1) == [11.0, 21.0, 22.0]
    assert step_ends([slow, quick, quick], steps_ahead=1) == [11.0, 12.0, 16.0]


def test_where_producers_go_first_no_microbatch_begins_before_all_forwards():
    work = step([[1.0, 1.0]], [[made(2.0, 1.0, (0, 0)), made(2.0, 1.0, (0, 1))]])
    assert step_ends([work]) == [2 + 1 + 1 + 1]
    assert step_ends([work], producers_first=True) == [2 + 2 + 1 + 1]


def test_everything_that_is_computed_can_be_seen():
    work = step([[2.0, 3.0]], [[made(1.0, 2.0, (0, 1))]])
    spans = simulate_steps([work, work], StepRules({"t": [(0,)], "a": [(1,)]}, EDGES)).spans
    found = [(*span.work.batch, span.work.kind, span.rank, span.start, span.end) for span in spans if span.step == 0]
    assert sorted(found) == [
        ("a", 0, 0, "backward", 1, 5.0, 7.0),
        ("a", 0, 0, "forward", 1, 0.0, 1.0),
        ("t", 0, 0, "backward", 0, 1.0, 2.0),
        ("t", 0, 0, "forward", 0, 0.0, 1.0),
        ("t", 0, 1, "backward", 0, 3.5, 5.0),
        ("t", 0, 1, "forward", 0, 2.0, 3.5),
    ]
    assert len(spans) == 2 * len(found)


def test_the_work_of_a_plan_names_readers_and_leaves_empty_batches_out():
    sizes = make_sizes((10, [5]), (10, []), (10, [7]))
    microbatches = ((np.array([0]), np.array([1])), (np.array([], dtype=np.int64), np.array([2])))
    batches = ((np.array([], dtype=np.int64), np.array([0, 1])),)
    plan = StepPlan(np.arange(3), sizes, {"backbone": microbatches, "encoder": batches})
    seconds = {
        role: lambda n, last=last: PassTimes(float(n.sum()), last)
        for role, last in (("backbone", 1.0), ("encoder", 0.5))
    }
    work = step_work(plan, seconds, {"encoder": [{1}]})
    assert [[batch.forward for batch in of_rank] for of_rank in work["backbone"]] == [[15.0, 10.0], [0.0, 17.0]]
    readers = (BatchOf("backbone", 0, 0), BatchOf("backbone", 1, 1))
    assert work["encoder"] == [[TimedBatch(48.0, 0.5, readers, recomputed=True)]]


POSITIONS = st.lists(
    st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.just(0.0) | st.floats(0.01, 2)), min_size=1, max_size=8
)


@pytest.mark.parametrize("sync_every", SYNC_EVERY)
@given(POSITIONS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_closed_form_is_the_simulation_of_encoder_ranks_with_equal_shares(
    sync_every, positions, encoder_ranks, random
):
    *costs, media = np.array(positions).T
    order = np.arange(len(media))
    random.shuffle(order)
    batches = [
        made(media[position] / 3, media[position] * 2 / 3, *((lane, turn) for lane in range(len(costs))))
        for turn, position in enumerate(order)
        if media[position] > 0
    ]
    meet = sync_every == "microbatch"
    simulated = makespan([cost[order].tolist() for cost in costs], [batches] * encoder_ranks, meet=meet)
    cost = np.stack(costs, axis=1)
    lanes = cost.max(axis=1, keepdims=True) if meet else cost
    assert closed_form_time(order, lanes, media) == pytest.approx(simulated, rel=1e-12)
