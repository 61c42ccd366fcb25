"""The lanes' rules, one by one; consecutive steps; what has to be recomputed; the closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import SYNC_EVERY, StepPlan
from flowtrain_lightning.packing.simulator import (
    closed_form_time,
    recomputed_batches,
    simulate_step,
    simulate_steps,
)
from flowtrain_lightning.packing.step_work import EncoderWork, Lanes, StepWork, step_work
from tests.packing.sizes import RANKS, make_sizes, plan_of, sizes_strategy


def makespan(microbatches, encoder_batches, *, sync_every="microbatch", kept_batches=None, colocated=False):
    work = StepWork(microbatches, encoder_batches)
    lanes = Lanes.separate(work, sync_every=sync_every, kept_batches=kept_batches)
    if colocated:
        lanes = Lanes(lanes.backbone, lanes.backbone, sync_every, kept_batches)
    return simulate_step(work, lanes).makespan


def test_without_media_a_step_takes_what_the_backbone_takes():
    work = StepWork([[1.0, 2.0], [2.0, 1.0]], [[]])
    found = simulate_step(work, Lanes.separate(work, sync_every="step"))
    assert (found.makespan, found.work) == (3.0, 3.0)


def test_ranks_that_synchronise_wait_for_the_slowest_at_every_microbatch():
    assert makespan([[1.0, 2.0], [2.0, 1.0]], [[]]) == 4.0


def test_a_microbatch_waits_for_its_features_and_an_encoder_for_their_gradients():
    assert makespan([[4.0]], [[EncoderWork(1.0, 2.0, ((0, 0),))]]) == 1.0 + 4.0 + 2.0


def test_text_first_and_last_hides_the_encoder():
    assert makespan([[2.0, 2.0, 2.0]], [[EncoderWork(1.0, 2.0, ((0, 1),))]]) == 6.0


def test_an_encoder_that_does_not_train_has_no_backward():
    batches = [EncoderWork(1.0, 0.0, ((0, position),)) for position in range(3)]
    assert makespan([[2.0, 2.0, 2.0]], [batches]) == 1.0 + 6.0


def test_a_limit_of_kept_activations_holds_later_forwards_back():
    batches = [EncoderWork(1.0, 1.0, ((0, position),)) for position in range(2)]
    assert makespan([[3.0, 3.0]], [batches]) == 1 + 3 + 3 + 1
    assert makespan([[3.0, 3.0]], [batches], kept_batches=1) == 1 + 3 + 1 + 1 + 3 + 1


def test_a_colocated_rank_does_one_thing_at_a_time():
    assert makespan([[4.0, 1.0]], [[EncoderWork(1.0, 2.0, ((0, 0),))]], colocated=True) == 8.0


def test_an_order_that_the_limit_blocks_is_refused():
    batches = [EncoderWork(1.0, 1.0, ((0, 0),)), EncoderWork(1.0, 1.0, ((0, 0),))]
    with pytest.raises(ValueError, match="kept_batches=1 keeps too few"):
        makespan([[1.0]], [batches], kept_batches=1)


def test_a_recomputed_batch_keeps_nothing_and_takes_its_forward_twice():
    batches = [EncoderWork(1.0, 1.0, ((0, 0),)), EncoderWork(1.0, 1.0, ((0, 0),), recomputed=True)]
    # Two forwards, the microbatch, a backward, and forward and backward of the second.
    assert makespan([[4.0]], [batches], kept_batches=1) == 1 + 1 + 4 + 1 + (1 + 1)


def test_lanes_that_synchronise_begin_when_all_of_them_have_their_features():
    # Rank 0 could begin its microbatch, but would wait there for rank 1, whose features it has yet to encode.
    batches = [[EncoderWork(2.0, 0.0, ((1, 0),))], [EncoderWork(1.0, 0.0, ((1, 0),))]]
    assert makespan([[1.0], [1.0]], batches, colocated=True) == 2 + 1


def test_a_rank_that_waits_at_a_microbatch_leaves_it_to_encode_what_others_lack():
    # Rank 0 waits for rank 1 from 2 s on, whose second microbatch, from 3 s on, reads what rank 0 has yet to encode.
    batches = [[EncoderWork(1.0, 0.0, ((0, 0),)), EncoderWork(1.0, 0.0, ((1, 1),))], [EncoderWork(1.0, 0.0, ((1, 0),))]]
    assert makespan([[1.0, 1.0], [2.0, 1.0]], batches, colocated=True) == 1 + 2 + 1 + 1


def test_ranks_that_share_a_microbatch_begin_it_together_and_others_by_themselves():
    work = StepWork([[1.0, 1.0], [3.0, 1.0]], [[EncoderWork(2.0, 1.0, ((0, 1),))], []]).on_ranks(2, 1)
    lanes = Lanes((0, 1, 2, 3), (0, 4), sync_every="step", backbone_group=2)
    spans = simulate_steps([work], lanes).spans
    found = {(span.kind, span.rank, span.number): (span.start, span.end) for span in spans}
    assert found["microbatch", 0, 0] == found["microbatch", 1, 0] == (0.0, 1.0)
    assert found["forward", 0, 0] == (1.0, 3.0)  # meanwhile rank 1 has nothing to do
    assert found["microbatch", 0, 1] == found["microbatch", 1, 1] == (3.0, 4.0)
    assert found["microbatch", 2, 1] == found["microbatch", 3, 1] == (3.0, 4.0)
    assert found["backward", 0, 0] == (4.0, 5.0)


def test_ranks_that_share_an_encoder_batch_begin_it_once_all_of_them_are_free():
    work = StepWork([[1.0, 1.0], [2.0, 1.0]], [[EncoderWork(1.0, 1.0, ((0, 1), (1, 1)))]]).on_ranks(1, 2)
    lanes = Lanes((0, 1), (0, 1), sync_every="step", encoder_group=2)
    spans = simulate_steps([work], lanes).spans
    found = {(span.kind, span.rank): (span.start, span.end) for span in spans if span.kind != "microbatch"}
    assert found["forward", 0] == found["forward", 1] == (2.0, 3.0)
    assert found["backward", 0] == found["backward", 1] == (4.0, 5.0)


def test_ranks_that_need_each_other_do_their_forwards_first_and_their_backwards_last():
    # Without a fixed order rank 0 would encode for the second microbatch between the two, and rank 1 wait for it.
    work = StepWork([[1.0, 1.0], [1.0, 1.0]], [[EncoderWork(1.0, 2.0, ((1, 1),))], [EncoderWork(1.0, 2.0, ((0, 0),))]])
    lanes = Lanes((0, 1), (0, 1), sync_every="step", kept_batches=1, backbone_group=2, in_fixed_order=True)
    spans = simulate_steps([work], lanes).spans
    for rank in (0, 1):
        order = [span.kind for span in sorted(spans, key=lambda span: span.start) if span.rank == rank]
        assert order == ["forward", "microbatch", "microbatch", "backward"]
    assert max(span.end for span in spans) == 1 + 1 + 1 + 2


def test_a_shard_group_with_a_frozen_encoder_encodes_all_of_a_step_first():
    batches = [[EncoderWork(1.0, 0.0, ((0, 0),)), EncoderWork(1.0, 0.0, ((1, 1),))], [EncoderWork(2.0, 0.0, ((1, 0),))]]
    work = StepWork([[1.0, 1.0], [1.0, 1.0]], batches)
    lanes = Lanes((0, 1), (0, 1), sync_every="step", kept_batches=1, backbone_group=2, in_fixed_order=True)
    assert simulate_steps([work, work], lanes).backbone_ends == [2 + 2, 2 * (2 + 2)]


def backbone_ends(steps, **rules):
    lanes = Lanes(backbone=(0,), encoder=(1,), sync_every="step", **rules)
    return simulate_steps(steps, lanes).backbone_ends


def test_the_backbone_goes_on_while_the_encoder_still_does_its_backward():
    step = StepWork([[2.0, 3.0]], [[EncoderWork(1.0, 2.0, ((0, 1),))]])
    # The second step begins with text at 5 s, the encoder at 7 s; its features are there at 8 s.
    assert backbone_ends([step, step]) == [5.0, 8.0 + 3.0]


def test_an_encoder_that_does_not_train_works_ahead_into_later_steps():
    step = StepWork([[3.0]], [[EncoderWork(1.0, 0.0, ((0, 0),))]])
    assert backbone_ends([step] * 4, steps_ahead=8) == [4.0, 7.0, 10.0, 13.0]
    assert backbone_ends([step] * 4, steps_ahead=0) == [4.0, 8.0, 12.0, 16.0]


def test_an_encoder_works_no_further_ahead_than_it_may():
    quick = StepWork([[1.0]], [[EncoderWork(4.0, 0.0, ((0, 0),))]])
    slow = StepWork([[10.0]], [[EncoderWork(1.0, 0.0, ((0, 0),))]])
    # At 1 s the third step's features could be begun at 2 s, but the first step ends at 11 s only.
    assert backbone_ends([slow, slow, quick], steps_ahead=1) == [11.0, 21.0, 22.0]
    assert backbone_ends([slow, quick, quick], steps_ahead=1) == [11.0, 12.0, 16.0]


def test_where_the_encoder_goes_first_no_microbatch_begins_before_all_forwards():
    step = StepWork([[1.0, 1.0]], [[EncoderWork(2.0, 1.0, ((0, 0),)), EncoderWork(2.0, 1.0, ((0, 1),))]])
    assert backbone_ends([step]) == [2 + 1 + 1 + 1]
    assert backbone_ends([step], encoder_first=True) == [2 + 2 + 1 + 1]


def test_everything_that_is_computed_can_be_seen():
    step = StepWork([[2.0, 3.0]], [[EncoderWork(1.0, 2.0, ((0, 1),))]])
    spans = simulate_steps([step, step], Lanes(backbone=(0,), encoder=(1,), sync_every="step")).spans
    found = [(span.kind, span.rank, span.number, span.start, span.end) for span in spans if span.step == 0]
    assert sorted(found) == [
        ("backward", 1, 0, 5.0, 7.0),
        ("forward", 1, 0, 0.0, 1.0),
        ("microbatch", 0, 0, 0.0, 2.0),
        ("microbatch", 0, 1, 2.0, 5.0),
    ]
    assert len(spans) == 2 * len(found)


def test_the_work_of_a_plan_names_readers_and_leaves_empty_batches_out():
    sizes = make_sizes((10, [5]), (10, []), (10, [7]))
    microbatches = ((np.array([0]), np.array([1])), (np.array([], dtype=np.int64), np.array([2])))
    batches = ((np.array([], dtype=np.int64), np.array([0, 1])),)
    plan = StepPlan(np.arange(3), sizes, microbatches, batches)
    work = step_work(plan, lambda tokens: float(tokens.sum()), lambda patches: (float(patches.sum()), 0.5), [{1}])
    assert work.microbatches == [[15.0, 10.0], [0.0, 17.0]]
    assert work.encoder_batches == [[EncoderWork(48.0, 0.5, ((0, 0), (1, 1)), recomputed=True)]]


@given(sizes_strategy(), RANKS, RANKS)
def test_where_all_may_be_kept_nothing_is_recomputed(sizes, encoders, backbones):
    assert not any(recomputed_batches(plan_of(sizes, encoders, backbones), kept_batches=1000))


@given(sizes_strategy(), RANKS, RANKS)
def test_where_none_may_be_kept_everything_is_recomputed(sizes, encoders, backbones):
    plan = plan_of(sizes, encoders, backbones)
    everything = tuple(
        frozenset(number for number, media in enumerate(batches) if len(media)) for batches in plan.encoder_batches
    )
    assert recomputed_batches(plan, kept_batches=0) == everything


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 5))
def test_a_larger_limit_never_recomputes_more(sizes, encoders, backbones, limit):
    plan = plan_of(sizes, encoders, backbones)
    less, more = recomputed_batches(plan, limit), recomputed_batches(plan, limit + 1)
    assert sum(map(len, more)) <= sum(map(len, less))


@pytest.mark.parametrize("limit", [1, 2])
def test_one_encoder_rank_that_feeds_one_backbone_rank_recomputes_nothing(limit):
    plan = plan_of(make_sizes(*[(20, [10])] * 12), 1, 1)
    assert recomputed_batches(plan, limit) == (frozenset(),)


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_only_recomputed_batches_keep_a_step_from_blocking_whatever_takes_how_long(
    sizes, encoders, backbones, limit, random
):
    plan = plan_of(sizes, encoders, backbones)
    recomputed = recomputed_batches(plan, limit)

    def simulate(marked):
        def time(_):
            return random.random()

        work = step_work(plan, time, lambda _: (random.random(), 0.1 + random.random()), marked)
        return simulate_step(work, Lanes.separate(work, sync_every="step", kept_batches=limit))

    simulate(recomputed)
    if any(recomputed):
        with pytest.raises(ValueError, match="keeps too few encoder batches"):
            simulate(None)


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 5), st.data())
def test_no_order_of_events_blocks_or_keeps_more_than_the_limit(sizes, encoders, backbones, limit, data):
    plan = plan_of(sizes, encoders, backbones)
    step = AnyOrder(plan, limit, recomputed_batches(plan, limit))
    while not step.is_over:
        events = step.possible_events()
        assert events, "every rank waits"
        step.happen(events[data.draw(st.integers(0, len(events) - 1))])
        assert max(step.kept) <= limit


class AnyOrder:
    """A step in which any event that may happen can be the next one."""

    def __init__(self, plan: StepPlan, limit: int, recomputed: tuple[frozenset[int], ...]) -> None:
        self.plan, self.limit, self.recomputed = plan, limit, recomputed
        self.batches = [[n for n, media in enumerate(of_rank) if len(media)] for of_rank in plan.encoder_batches]
        self.done = [0] * len(plan.microbatches)
        self.forwards = [0] * len(self.batches)
        self.backwards = [0] * len(self.batches)
        self.kept = [0] * len(self.batches)

    @property
    def is_over(self) -> bool:
        return self.backwards == [len(batches) for batches in self.batches]

    def possible_events(self) -> list[tuple[str, int]]:
        events = []
        for rank, batches in enumerate(self.batches):
            done = self.forwards[rank]
            if done < len(batches) and (batches[done] in self.recomputed[rank] or self.kept[rank] < self.limit):
                events.append(("forward", rank))
            if self.backwards[rank] < done and self.has_gradients(rank):
                events.append(("backward", rank))
        for rank, of_rank in enumerate(self.plan.microbatches):
            if self.done[rank] < len(of_rank) and self.has_features(rank):
                events.append(("microbatch", rank))
        return events

    def happen(self, event: tuple[str, int]) -> None:
        kind, rank = event
        if kind == "microbatch":
            self.done[rank] += 1
            return
        counts, change = (self.forwards, 1) if kind == "forward" else (self.backwards, -1)
        if self.batches[rank][counts[rank]] not in self.recomputed[rank]:
            self.kept[rank] += change
        counts[rank] += 1

    def has_features(self, rank: int) -> bool:
        return all(
            self.batches[entry.encoder_rank].index(entry.encoder_batch) < self.forwards[entry.encoder_rank]
            for entry in self.plan.entries
            if (entry.backbone_rank, entry.microbatch) == (rank, self.done[rank])
        )

    def has_gradients(self, rank: int) -> bool:
        number = self.batches[rank][self.backwards[rank]]
        return all(
            entry.microbatch < self.done[entry.backbone_rank]
            for entry in self.plan.entries
            if (entry.encoder_rank, entry.encoder_batch) == (rank, number)
        )


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
        EncoderWork(media[position] / 3, media[position] * 2 / 3, tuple((lane, turn) for lane in range(len(costs))))
        for turn, position in enumerate(order)
        if media[position] > 0
    ]
    simulated = makespan([cost[order].tolist() for cost in costs], [batches] * encoder_ranks, sync_every=sync_every)
    cost = np.stack(costs, axis=1)
    lanes = cost.max(axis=1, keepdims=True) if sync_every == "microbatch" else cost
    assert closed_form_time(order, lanes, media) == pytest.approx(simulated, rel=1e-12)
