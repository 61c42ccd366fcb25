"""Media items that several samples have: one is encoded for all, where it is read first, and costs once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import SampleSizes, StepPlan
from flowtrain_lightning.packing.shared_media import encoded_parts
from flowtrain_lightning.packing.step_work import in_two_passes, step_work
from tests.packing.sizes import BUDGETS, RANKS, TOKEN_BUDGET, plan_of, shared_sizes, sharing_strategy


def encoded(plan: StepPlan) -> list[int]:
    return [item for of_rank in plan.batches["encoder"] for batch in of_rank for item in batch.tolist()]


@settings(max_examples=25)
@given(sharing_strategy(30), BUDGETS, RANKS, RANKS, st.booleans())
def test_every_media_item_is_read_from_one_that_is_the_same_and_comes_no_later(
    sizes: SampleSizes, budget: int, encoders: int, backbones: int, local: bool
) -> None:
    encoders = backbones if local else encoders
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget, local=local)
    found, (rank, position) = encoded(plan), plan.readers
    source = np.arange(len(rank)) if plan.encoded_as is None else plan.encoded_as
    assert sorted(found) == sorted({*source.tolist()})
    assert sizes.media_content is not None
    assert (sizes.media_content[source] == sizes.media_content).all()
    assert (position[source] <= position).all()
    assert not local or (rank[source] == rank).all()
    read = [(entry, reader) for entry in plan.entries for reader in entry.readers]
    assert {(int(item), *reader) for entry, reader in read for item in entry.media} == {
        (int(source[item]), "backbone", int(rank[item]), int(position[item])) for item in range(len(rank))
    }
    for of_rank, until in zip(plan.turns["encoder"], plan.read_until["encoder"], strict=True):
        assert list(of_rank) == sorted(of_rank) or local
        assert all(turn[0] <= last for turn, last in zip(of_rank, until, strict=True))


@settings(max_examples=40)
@given(sharing_strategy(60), BUDGETS, RANKS, st.booleans())
def test_what_later_microbatches_read_lies_apart_and_fits_in_an_encoder_batch(
    sizes: SampleSizes, budget: int, ranks: int, local: bool
) -> None:
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget, local=local)
    rank, position = plan.readers
    until = np.array([max([reader.number for reader in readers], default=-1) for readers in plan.media_readers])
    for own in [rank == each for each in range(ranks)] if local else [np.ones(len(rank), dtype=bool)]:
        for moment in range(len(plan.microbatches[0])):
            kept = own & (position <= moment) & (moment < until)
            assert sizes.media_patches[kept].sum() <= budget * (1 if local else ranks)
    for batch in (batch for of_rank in plan.batches["encoder"] for batch in of_rank):
        assert len({*(until[batch] > position[batch]).tolist()}) <= 1


def test_two_of_many_samples_share_a_picture_if_one_microbatch_has_both() -> None:
    others = [(10, [2 + number]) for number in range(22)]
    half = TOKEN_BUDGET // 2 + 1  # no microbatch has room for both
    sizes = shared_sizes([(half, [1]), *others, (half, [1])], [1, *[8] * 23])
    assert len(encoded(plan_of(sizes, 1, 1))) == 24
    near = shared_sizes([(10, [1, 1]), *others], [1, *[8] * 23])
    assert len(encoded(plan_of(near, 1, 1))) == 23


def test_five_questions_on_a_picture_cost_the_encoder_one_picture() -> None:
    samples = [(10, [1 + number // 5]) for number in range(20)]
    sizes = shared_sizes(samples, [1, 8, 8, 8, 8])
    once, often = plan_of(sizes, 1, 1), plan_of(replace(sizes, media_content=None), 1, 1)
    assert (len(encoded(once)), len(encoded(often))) == (4, 20)
    costs = {
        "backbone": lambda tokens: in_two_passes(1.0),
        "encoder": lambda patches: in_two_passes(float(patches.sum())),
    }
    seconds = [
        sum(batch.seconds for batches in step_work(plan, costs)["encoder"] for batch in batches)
        for plan in (once, often)
    ]
    assert 5 * seconds[0] == seconds[1]


def test_what_has_other_rows_is_another_media_item() -> None:
    sizes = shared_sizes([(10, [1]), (10, [1])], [1, 8])
    assert len(encoded(plan_of(sizes, 1, 1))) == 1
    assert len(encoded(plan_of(replace(sizes, media_rows=np.array([8, 9])), 1, 1))) == 2


def test_the_parts_of_equal_media_items_make_those_that_a_step_encodes() -> None:
    content = np.array([0, 0, 0, 0, 1, 1, 2, -1])
    together = encoded_parts(content, 8, samples=8, step=4, together=True)
    assert together.tolist() == [1 / 4] * 4 + [1 / 2] * 2 + [1, 1]
    assert encoded_parts(content, 8, samples=8, step=2, together=True)[0] == 2 / 4  # no step has room for all four
    by_chance = encoded_parts(content, 8, samples=8, step=4, together=False)
    assert by_chance[0] == (1 - (1 / 2) ** 4) / (4 / 2)
    assert by_chance[6] == 1
    assert encoded_parts(content, 8, samples=8, step=16, together=False).tolist() == (together / 2).tolist()
    assert encoded_parts(None, 3, samples=8, step=4, together=True).tolist() == [1, 1, 1]
