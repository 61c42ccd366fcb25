"""Samples of files: which records are kept, cut, dropped or refused, and how several files are read as one."""

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.data import DataError, IndexConfig, IndexedSource, JoinedSources, JsonFile
from tests.data.support import IMAGES, MEASURE, message_record, write_image, write_records, write_set


@pytest.fixture
def mixed(tmp_path):
    """Records of 12, 12, 40 and 29 tokens; the third is long by text, the fourth by its second image."""
    wide = write_image(tmp_path / "p/wide.png", 4, 16)
    large = write_image(tmp_path / "p/large.png", 12, 16)
    return write_records(
        tmp_path / "d.jsonl",
        [
            message_record(0, "a" * 4, "b" * 3, []),
            message_record(1, "", "b", [wide]),
            message_record(2, "a" * 4, "b" * 31, []),
            message_record(3, "", "b" * 4, [wide, large]),
        ],
    )


def source_of(file, budget=100, too_long="error", **measure):
    return IndexedSource(JsonFile(file), replace(MEASURE, **measure), budget, IndexConfig(too_long))


def test_samples_are_the_records_of_the_file(mixed):
    source = source_of(mixed)
    assert len(source) == 4
    assert [source.record(sample).id for sample in range(4)] == ["r0", "r1", "r2", "r3"]
    assert source.sizes(np.array([2, 0])).tokens.tolist() == [40, 12]
    assert source.summary == "d.jsonl: 4 of 4 records used."


def test_a_long_record_is_named_with_its_sizes_and_the_ways_out(mixed):
    words = (
        r"record 3 \(id 'r2'\): it has 40 tokens \(0 of them from 0 media items\), more than token_budget=20.*too_long"
    )
    with pytest.raises(DataError, match=words):
        source_of(mixed, 20)


def test_long_records_are_dropped_and_counted(mixed):
    source = source_of(mixed, 20, "drop")
    assert [source.record(sample).id for sample in range(len(source))] == ["r0", "r1"]
    assert source.summary == "d.jsonl: 2 of 4 records used, 2 dropped as longer than token_budget=20."


def test_long_records_are_cut_and_those_without_targets_left_out(mixed):
    source = source_of(mixed, 20, "truncate")
    assert [source.record(sample).id for sample in range(len(source))] == ["r0", "r1", "r2"]
    sizes = source.sizes(np.arange(3))
    assert sizes.tokens.tolist() == [12, 12, 20]
    assert sizes.targets.tolist() == [4, 2, 12]
    assert source.summary == (
        "d.jsonl: 3 of 4 records used, 1 cut to token_budget=20, "
        "1 dropped since no target was left within token_budget=20."
    )


def test_a_cut_prompt_is_kept_although_it_has_no_target(mixed):
    source = source_of(mixed, 10, "truncate", prompt=True)
    assert source.sizes(np.arange(4)).tokens.tolist() == [8, 10, 8, 9]
    assert source.sizes(np.arange(4)).media_rows.tolist() == [4, 4]


def test_records_with_bad_images_are_dropped_and_counted(mixed):
    (mixed.parent / "p/large.png").unlink()
    source = source_of(mixed, unreadable="drop")
    assert len(source) == 3
    assert source.summary == "d.jsonl: 3 of 4 records used, 1 dropped for a media item that cannot be used."


def test_a_set_that_is_or_becomes_empty_is_refused(mixed, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: there is no record in it"):
        source_of(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"no record is left to use.*0 of 4 records used, 4 dropped as longer"):
        source_of(mixed, 5, "drop")


def test_the_fingerprint_is_that_of_the_numbered_samples(mixed):
    whole = source_of(mixed).fingerprint
    assert whole == source_of(mixed, 50).fingerprint
    assert whole == source_of(mixed, images=replace(IMAGES, max_pixels=128)).fingerprint
    assert whole != source_of(mixed, 20, "drop").fingerprint


def test_joined_sources_number_their_samples_one_after_another(tmp_path):
    files = [write_set(tmp_path / f"{name}.jsonl", count, first) for name, count, first in (("a", 4, 0), ("b", 5, 4))]
    joined = JoinedSources([source_of(file) for file in files])
    whole = source_of(write_set(tmp_path / "whole.jsonl", 9))
    assert len(joined) == 9
    assert joined.lengths == (4, 5)
    assert [joined.record(sample).id for sample in (0, 3, 4, 8)] == ["r0", "r3", "r4", "r8"]
    asked = np.array([8, 0, 5, 5, 2, 7, 1])
    for name in ("tokens", "targets", "media_start", "media_rows", "media_patches"):
        np.testing.assert_array_equal(getattr(joined.sizes(asked), name), getattr(whole.sizes(asked), name))
    assert joined.sizes(np.array([1])).tokens.tolist() == whole.sizes(np.array([1])).tokens.tolist()


def test_records_without_loss_are_counted(tmp_path):
    records = [message_record(0, "a", "b", []), message_record(1, "a", "b", [])]
    records[1]["messages"].pop()
    file = write_records(tmp_path / "d.jsonl", records)
    told = "2 of 2 records used, 1 of these without loss, as nothing in them is said by the assistant."
    assert source_of(file).summary == f"d.jsonl: {told}"
    assert source_of(file, prompt=True).summary == "d.jsonl: 2 of 2 records used."
    write_records(file, records[1:])
    assert len(source_of(file, prompt=True)) == 1
    with pytest.raises(
        DataError, match=r"d\.jsonl: nothing would be learned from it, since in no record the assistant"
    ):
        source_of(file)


def test_a_folder_is_not_taken_for_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="this is a folder; name its files, several as a list"):
        source_of(tmp_path)
