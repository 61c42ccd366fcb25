"""Samples of one picture come in one step as far as it has room for them; which ones follows from the seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.data import DataError, FlowDataModule, StepLoader, TokenSteps
from flowtrain_lightning.packing.media_groups import MediaGroups
from tests.data.support import IMAGES, TEMPLATE, Letters, message_record, write_image, write_records

PICTURES, QUESTIONS = 6, 5


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five questions about each picture, far from each other in the file, and some records without a picture."""
    folder = tmp_path_factory.mktemp("groups")
    images = [write_image(folder / f"images/{number}.png", 8, 8, seed=number) for number in range(PICTURES)]
    told = [message_record(n, "?" * (1 + n % 4), "yes", [images[n % PICTURES]]) for n in range(PICTURES * QUESTIONS)]
    return write_records(folder / "train.jsonl", [*told, *(message_record(n, "?", "no", []) for n in range(30, 40))])


def loader_of(records: Path, **settings: Any) -> StepLoader:
    chosen: dict[str, Any] = {"global_batch_size": 10, "group_by": "media", "seed": 3, **settings}
    data = FlowDataModule(records, tokenizer=Letters(), template=TEMPLATE, images=IMAGES, token_budget=100, **chosen)
    return data.train_dataloader()


def samples(loader: StepLoader, epoch: int = 0) -> list[list[int]]:
    steps = loader.steps
    return [steps.plan(epoch, step).samples.tolist() for step in range(len(steps))]


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_questions_about_a_picture_are_in_one_step_which_encodes_it_once(records: Path, shuffle: bool) -> None:
    loader = loader_of(records, shuffle=shuffle)
    steps = samples(loader)
    assert sorted(sample for step in steps for sample in step) == list(range(40))
    assert all(len(step) == 10 for step in steps)
    for picture in range(PICTURES):
        assert sum(any(n < 30 and n % PICTURES == picture for n in step) for step in steps) == 1
    encoded = [sum(len(batch) for batch in loader.steps.plan(0, step).batches["encoder"][0]) for step in range(4)]
    assert sum(encoded) == PICTURES


def test_the_order_follows_from_the_seed_and_is_another_one_in_each_epoch(records: Path) -> None:
    first = samples(loader_of(records))
    assert samples(loader_of(records)) == first
    assert samples(loader_of(records), epoch=1) != first
    assert samples(loader_of(records, seed=4)) != first
    assert loader_of(records, group_by=None).differences(loader_of(records).state_dict())


def test_without_it_or_with_augmented_pictures_all_is_as_ever(records: Path) -> None:
    plain = loader_of(records, group_by=None)
    for picture in range(PICTURES):
        assert sum(any(n < 30 and n % PICTURES == picture for n in step) for step in samples(plain)) > 1
    augmented = loader_of(records, augment=lambda image, generator: image)
    encoded = [sum(len(batch) for batch in augmented.steps.plan(0, step).batches["encoder"][0]) for step in range(4)]
    assert sum(encoded) == PICTURES * QUESTIONS


def test_steps_of_full_microbatches_take_them_side_by_side(records: Path) -> None:
    loader = loader_of(records, global_batch_size=None, token_steps=TokenSteps(microbatches=2))
    steps = samples(loader)
    apart = Counter(n % PICTURES for step in steps for n in {m % PICTURES for m in step if m < 30})
    plain = samples(loader_of(records, global_batch_size=None, group_by=None, token_steps=TokenSteps(microbatches=2)))
    apart_plain = Counter(n % PICTURES for step in plain for n in {m % PICTURES for m in step if m < 30})
    assert sum(apart.values()) < sum(apart_plain.values())


def test_data_in_which_no_picture_occurs_twice_are_refused(tmp_path: Path) -> None:
    told = [message_record(n, "?", "yes", [write_image(tmp_path / f"images/{n}.png", 8, 8)]) for n in range(12)]
    with pytest.raises(DataError, match="of no two samples it is known that they have a picture in common"):
        loader_of(write_records(tmp_path / "train.jsonl", told))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 9))
def test_a_group_is_cut_only_where_no_other_fits_or_no_step_has_room(groups: list[int], step: int) -> None:
    made = MediaGroups(np.array(groups))
    order = made.ordered(np.arange(len(groups)), step)
    assert sorted(order.tolist()) == list(range(len(groups)))
    steps = [order[start : start + step] for start in range(0, len(order), step)]
    counts = Counter(groups)
    if step > 1:
        for group, count in counts.items():
            in_steps = sum(bool((made.of_sample[each] == group).any()) for each in steps)
            assert in_steps <= -(-count // step) + 1
