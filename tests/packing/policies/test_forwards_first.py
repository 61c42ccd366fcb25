"""What a member has to recompute so that no order of events blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.policies.forwards_first import recomputed_batches
from flowtrain_lightning.packing.simulator import simulate_step
from flowtrain_lightning.packing.step_graph import BlockedError
from flowtrain_lightning.packing.step_work import PassTimes, StepRules, step_work
from tests.packing.sizes import FEATURES, RANKS, make_sizes, plan_of, sizes_strategy


def recomputed(plan: StepPlan, kept: int) -> tuple[frozenset[int], ...]:
    """The batches of each encoder member."""
    return recomputed_batches(plan, kept)["encoder"]


@given(sizes_strategy(), RANKS, RANKS)
def test_where_all_may_be_kept_nothing_is_recomputed(sizes, encoders, backbones):
    assert not any(recomputed(plan_of(sizes, encoders, backbones), 1000))


@given(sizes_strategy(), RANKS, RANKS)
def test_where_none_may_be_kept_everything_is_recomputed(sizes, encoders, backbones):
    plan = plan_of(sizes, encoders, backbones)
    everything = tuple(
        frozenset(number for number, media in enumerate(batches) if len(media)) for batches in plan.batches["encoder"]
    )
    assert recomputed(plan, 0) == everything


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 5))
def test_a_larger_limit_never_recomputes_more(sizes, encoders, backbones, limit):
    plan = plan_of(sizes, encoders, backbones)
    less, more = recomputed(plan, limit), recomputed(plan, limit + 1)
    assert sum(map(len, more)) <= sum(map(len, less))


@pytest.mark.parametrize("limit", [1, 2])
def test_one_encoder_rank_that_feeds_one_backbone_rank_recomputes_nothing(limit):
    plan = plan_of(make_sizes(*[(20, [10])] * 12), 1, 1)
    assert recomputed(plan, limit) == (frozenset(),)


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_only_recomputed_batches_keep_a_step_from_blocking_whatever_takes_how_long(
    sizes, encoders, backbones, limit, random
):
    plan = plan_of(sizes, encoders, backbones)
    marked = recomputed_batches(plan, limit)

    def simulate(again):
        def passes(_):
            return PassTimes(random.random(), 0.1 + random.random())

        work = step_work(plan, {"backbone": passes, "encoder": passes}, again)
        return simulate_step(work, StepRules.separate(work, [FEATURES], in_flight={"encoder": limit}))

    simulate(marked)
    if any(marked["encoder"]):
        with pytest.raises(BlockedError, match="Allow more batches in flight"):
            simulate(None)


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 5), st.data())
def test_no_order_of_events_blocks_or_keeps_more_than_the_limit(sizes, encoders, backbones, limit, data):
    plan = plan_of(sizes, encoders, backbones)
    step = AnyOrder(plan, limit, recomputed(plan, limit))
    while not step.is_over:
        events = step.possible_events()
        assert events, "every rank waits"
        step.happen(events[data.draw(st.integers(0, len(events) - 1))])
        assert max(step.kept) <= limit


class AnyOrder:
    """A step in which any event that may happen can be the next one."""

    def __init__(self, plan: StepPlan, limit: int, recomputed: tuple[frozenset[int], ...]) -> None:
        self.plan, self.limit, self.recomputed = plan, limit, recomputed
        self.batches = [[n for n, media in enumerate(of_rank) if len(media)] for of_rank in plan.batches["encoder"]]
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
            self.batches[entry.maker.member].index(entry.maker.number) < self.forwards[entry.maker.member]
            for entry in self.plan.entries
            if entry.readers == (("backbone", rank, self.done[rank]),)
        )

    def has_gradients(self, rank: int) -> bool:
        number = self.batches[rank][self.backwards[rank]]
        return all(
            reader.number < self.done[reader.member]
            for entry in self.plan.entries
            for reader in entry.readers
            if entry.maker == ("encoder", rank, number)
        )
