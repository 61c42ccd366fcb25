"""Which encoder batches are computed twice, decided from the plan alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.activations import recomputed_batches
from tests.packing.sizes import make_sizes, plan_of, sizes_strategy

RANKS = st.integers(1, 4)


@given(sizes_strategy(), RANKS, RANKS)
def test_with_room_for_all_nothing_is_recomputed(sizes, encoders, backbones):
    assert not any(recomputed_batches(plan_of(sizes, encoders, backbones), limit=1000))


@given(sizes_strategy(), RANKS, RANKS)
def test_with_room_for_none_everything_is_recomputed(sizes, encoders, backbones):
    plan = plan_of(sizes, encoders, backbones)
    everything = tuple(
        frozenset(number for number, media in enumerate(batches) if len(media)) for batches in plan.encoder_batches
    )
    assert recomputed_batches(plan, limit=0) == everything


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 5), st.data())
def test_no_order_of_events_blocks_or_keeps_more_than_the_limit(sizes, encoders, backbones, limit, data):
    plan = plan_of(sizes, encoders, backbones)
    recomputed = recomputed_batches(plan, limit)
    play = Play(plan, limit, recomputed)
    while not play.is_over:
        events = play.possible_events()
        assert events, "every rank waits"
        play.happen(events[data.draw(st.integers(0, len(events) - 1))])
        assert max(play.kept) <= limit


@given(sizes_strategy(), RANKS, RANKS, st.integers(0, 5))
def test_more_room_never_recomputes_more(sizes, encoders, backbones, limit):
    plan = plan_of(sizes, encoders, backbones)
    less, more = recomputed_batches(plan, limit), recomputed_batches(plan, limit + 1)
    assert sum(map(len, more)) <= sum(map(len, less))


@pytest.mark.parametrize("limit", [1, 2])
def test_one_encoder_rank_that_feeds_one_backbone_rank_recomputes_nothing(limit):
    plan = plan_of(make_sizes(*[(20, [10])] * 12), 1, 1)
    assert recomputed_batches(plan, limit) == (frozenset(),)


class Play:
    """A step in which any event that may happen can be the next one."""

    def __init__(self, plan: StepPlan, limit: int, recomputed: tuple[frozenset[int], ...]) -> None:
        self.plan, self.limit, self.recomputed = plan, limit, recomputed
        self.batches = [[n for n, media in enumerate(of_rank) if len(media)] for of_rank in plan.encoder_batches]
        self.read = [0] * len(plan.microbatches)
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
            if self.backwards[rank] < done and self._has_gradients(rank):
                events.append(("backward", rank))
        for rank, of_rank in enumerate(self.plan.microbatches):
            if self.read[rank] < len(of_rank) and self._has_features(rank):
                events.append(("microbatch", rank))
        return events

    def happen(self, event: tuple[str, int]) -> None:
        kind, rank = event
        if kind == "microbatch":
            self.read[rank] += 1
            return
        counts, change = (self.forwards, 1) if kind == "forward" else (self.backwards, -1)
        if self.batches[rank][counts[rank]] not in self.recomputed[rank]:
            self.kept[rank] += change
        counts[rank] += 1

    def _has_features(self, rank: int) -> bool:
        return all(
            self.batches[entry.encoder_rank].index(entry.encoder_batch) < self.forwards[entry.encoder_rank]
            for entry in self.plan.entries
            if (entry.backbone_rank, entry.microbatch) == (rank, self.read[rank])
        )

    def _has_gradients(self, rank: int) -> bool:
        number = self.batches[rank][self.backwards[rank]]
        return all(
            entry.microbatch < self.read[entry.backbone_rank]
            for entry in self.plan.entries
            if (entry.encoder_rank, entry.encoder_batch) == (rank, number)
        )
