"""A data file is measured once; an index that is old, damaged or cannot be kept is no obstacle."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageFile

from flowtrain_lightning.data import DataError, JsonFile
from flowtrain_lightning.data.sources.index import IndexTable
from flowtrain_lightning.data.sources.index import index_table as table_of_store
from flowtrain_lightning.data.sources.measurers import Measurer, processes, this_process
from flowtrain_lightning.data.sources.measuring import Measure
from tests.data.support import IMAGES, MEASURE, TEMPLATE, Letters, message_record, write_image, write_records, write_set


def index_table(file: Path, measure: Measure, cache_dir: Path | None, measurer: Measurer = this_process) -> IndexTable:
    return table_of_store(JsonFile(file), measure, cache_dir, measurer)


@pytest.fixture
def file(tmp_path):
    return write_set(tmp_path / "data/d.jsonl", 7)


@pytest.fixture
def scans(monkeypatch):
    """Counts how often a file is measured."""
    seen = []
    plain = JsonFile.locate
    monkeypatch.setattr(JsonFile, "locate", lambda store: seen.append(store.path) or plain(store))
    return seen


def test_sizes_are_those_of_the_sequences_and_images(tmp_path):
    images = [write_image(tmp_path / "p/a.png", 4, 8), write_image(tmp_path / "p/b.png", 12, 8)]
    records = [message_record(0, "ab", "cde", images), message_record(1, "a", "b", [])]
    table = index_table(write_records(tmp_path / "d.jsonl", records), MEASURE, None)
    # <B><U> [II] [IIIIII] ab <E><A> cde<E>
    assert table.sizes.tokens.tolist() == [2 + 4 + 8 + 2 + 2 + 4, 2 + 1 + 2 + 2]
    assert table.sizes.targets.tolist() == [4, 2]
    assert table.sizes.media_start.tolist() == [0, 2, 2]
    assert table.sizes.media_rows.tolist() == [2, 6]
    assert table.sizes.media_patches.tolist() == [8, 24]
    assert table.readable.all()


def test_others_may_read_an_index_as_far_as_the_umask_lets_them(file, tmp_path):
    index_table(file, MEASURE, tmp_path / "cache")
    (kept,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert kept.stat().st_mode == file.stat().st_mode


def test_a_file_is_measured_once(file, scans):
    first, second = index_table(file, MEASURE, None), index_table(file, MEASURE, None)
    assert len(scans) == 1
    assert first.content == second.content
    for name in ("tokens", "targets", "media_start", "media_rows", "media_patches"):
        np.testing.assert_array_equal(getattr(first.sizes, name), getattr(second.sizes, name))
    np.testing.assert_array_equal(first.locations, second.locations)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": Letters("other")},
        {"template": replace(TEMPLATE, end="<E><E>")},
        {"images": replace(IMAGES, max_pixels=128)},
        {"unreadable": "drop"},
        {"prompt": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_measure_measures_anew_and_both_are_kept(file, scans, change):
    changed = replace(MEASURE, **change)
    for measure in (MEASURE, changed, MEASURE, changed):
        index_table(file, measure, None)
    assert len(scans) == 2


def test_a_changed_file_is_measured_anew(file, scans):
    before = index_table(file, MEASURE, None)
    write_set(file, 8)
    after = index_table(file, MEASURE, None)
    assert (len(before.locations), len(after.locations)) == (7, 8)
    assert before.content != after.content
    assert len(scans) == 2


def test_a_file_that_was_only_touched_or_moved_is_not(file, scans, tmp_path):
    index_table(file, MEASURE, None)
    os.utime(file, (1, 1))
    index_table(file, MEASURE, None)
    file.parent.rename(tmp_path / "elsewhere")
    index_table(tmp_path / "elsewhere/d.jsonl", MEASURE, None)
    assert len(scans) == 1


def test_a_damaged_cache_is_measured_anew(file, scans):
    index_table(file, MEASURE, None)
    (cache,) = (file.parent / ".flowtrain").iterdir()
    cache.write_bytes(cache.read_bytes()[:100])
    index_table(file, MEASURE, None)
    index_table(file, MEASURE, None)
    assert len(scans) == 2


def test_a_folder_for_the_cache_keeps_files_of_one_name_apart(tmp_path, scans):
    files = [write_set(tmp_path / f"{name}/d.jsonl", count) for name, count in (("a", 3), ("b", 4))]
    for _ in range(2):
        assert [len(index_table(file, MEASURE, tmp_path / "cache").locations) for file in files] == [3, 4]
    assert len(scans) == 2
    assert not (tmp_path / "a/.flowtrain").exists()


def test_beside_a_folder_that_cannot_be_written_the_cache_goes_home(file, scans, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (file.parent / ".flowtrain").write_text("in the way")
    for _ in range(2):
        index_table(file, MEASURE, None)
    assert len(scans) == 1
    assert list((tmp_path / "home/flowtrain").rglob("d.jsonl.*.npz"))


def test_a_user_without_a_home_has_the_cache_beside_the_data(file, scans, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    for _ in range(2):
        index_table(file, MEASURE, None)
    assert len(scans) == 1


def test_without_any_folder_for_the_cache_it_says_so_and_goes_on(file, scans, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    (file.parent / ".flowtrain").write_text("in the way")
    with pytest.warns(UserWarning, match=r"could not be kept.*cache_dir"):
        assert len(index_table(file, MEASURE, None).locations) == 7


def test_nothing_half_written_is_left(file):
    index_table(file, MEASURE, None)
    assert [entry.suffix for entry in (file.parent / ".flowtrain").iterdir()] == [".npz"]


@pytest.fixture
def decoded(monkeypatch):
    """Counts images that are decoded whole."""
    seen = []
    plain = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: seen.append(image) or plain(image))
    return seen


def test_only_headers_are_read_unless_bad_images_are_to_be_dropped(file, decoded):
    index_table(file, MEASURE, None)
    assert decoded == []
    index_table(file, replace(MEASURE, unreadable="drop"), None)
    assert len(decoded) == 2 * (1 + 2)


def test_an_image_that_cannot_be_used_stops_or_marks_its_record(file):
    whole = (file.parent / "images/2_1.png").read_bytes()
    (file.parent / "images/2_1.png").write_bytes(whole[:-60])
    (file.parent / "images/4_0.png").unlink()
    with pytest.raises(DataError, match=r"d\.jsonl, record 5 \(id 'r4'\): image .*4_0\.png .*there is no such file"):
        index_table(file, MEASURE, None)
    table = index_table(file, replace(MEASURE, unreadable="drop"), None)
    assert np.flatnonzero(~table.readable).tolist() == [2, 4]
    assert table.sizes.tokens[[2, 4]].tolist() == [0, 0]
    assert np.diff(table.sizes.media_start).tolist() == [0, 1, 0, 0, 0, 2, 0]


def test_a_file_is_measured_anew_once_an_image_can_be_used_that_could_not(file, scans):
    dropping = replace(MEASURE, unreadable="drop")
    image = file.parent / "images/4_0.png"
    whole = image.read_bytes()
    image.unlink()
    (file.parent / "images/1_0.png").write_bytes(b"no image")
    for _ in range(2):
        assert index_table(file, dropping, None).readable.sum() == 5
    assert len(scans) == 1
    image.write_bytes(whole)
    for _ in range(2):
        assert np.flatnonzero(~index_table(file, dropping, None).readable).tolist() == [1]
    assert len(scans) == 2


def test_several_processes_find_what_one_finds(tmp_path):
    file = write_set(tmp_path / "d.jsonl", 1100)
    first, second = (index_table(file, MEASURE, tmp_path / f"{count}", processes(count)) for count in (1, 2))
    for name in ("tokens", "targets", "media_start", "media_rows", "media_patches"):
        np.testing.assert_array_equal(getattr(first.sizes, name), getattr(second.sizes, name))
    np.testing.assert_array_equal(first.locations, second.locations)
    assert (first.content, first.animated) == (second.content, second.animated)


def test_of_several_processes_the_first_bad_record_in_the_file_is_named(tmp_path):
    file = write_records(tmp_path / "d.jsonl", [message_record(number, "a", "b", []) for number in range(1500)])
    lines = file.read_text().splitlines()
    lines[700], lines[1400] = "{", "["
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"d\.jsonl, record 701: not valid JSON"):
        index_table(file, MEASURE, None, processes(2))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file"):
        index_table(tmp_path / "none.jsonl", MEASURE, None)
