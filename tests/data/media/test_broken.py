"""Whatever has happened to a record or an image: it is refused in a sentence, or it is what a person sees in it."""

from collections import Counter

import pytest

from tests.data import broken_images, broken_records

COUNTS = [pytest.param(100, id="100"), pytest.param(1000, marks=pytest.mark.full, id="1000")]


@pytest.mark.parametrize("count", COUNTS)
def test_a_broken_record_is_refused_by_name_or_read_as_it_says(tmp_path, count):
    images = broken_records.make_images(tmp_path)
    broken_records.link_real_images(tmp_path)
    verdicts = Counter(broken_records.trial(seed, tmp_path, images) for seed in range(count))
    assert min(verdicts["refused"], verdicts["read as it says"]) > count / 10, verdicts


@pytest.mark.parametrize("count", COUNTS)
def test_a_broken_image_is_refused_by_name_or_shown_as_a_person_sees_it(tmp_path, count):
    verdicts = Counter(broken_images.trial(seed, tmp_path) for seed in range(count))
    assert min(verdicts["refused"], verdicts["shown"]) > count / 10, verdicts
