"""Whatever has happened to a record or an image: it is refused in a sentence, or it is what a person sees in it."""

import random
import warnings
from collections import Counter

import pytest

from tests.data.mutations import judge_image, judge_record, mutated_image, mutated_record, whole_record
from tests.data.support import write_image

COUNTS = [pytest.param(60, id="60"), pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(1800)], id="5000")]


@pytest.mark.parametrize("count", COUNTS)
def test_a_mutated_record_is_refused_by_name_or_read_as_it_says(tmp_path, count):
    images = [write_image(tmp_path / f"images/{number}.png", 4 + number, 8, seed=number) for number in range(3)]
    verdicts = Counter()
    for seed in range(count):
        chance = random.Random(seed)
        intact = whole_record(chance, images)
        line = mutated_record(chance, whole_record(chance, images))
        verdicts[judge_record(tmp_path, line, intact)] += 1
    assert min(verdicts["refused"], verdicts["read"]) > count / 10, verdicts


@pytest.mark.parametrize("count", COUNTS)
def test_a_mutated_image_is_refused_or_shown_as_a_person_sees_it(count):
    verdicts = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd tags
        for seed in range(count):
            verdicts[judge_image(mutated_image(random.Random(seed)))] += 1
    assert min(verdicts["refused"], verdicts["shown"]) > count / 10, verdicts
