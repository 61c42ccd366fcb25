"""An image or a video that is rewritten is noticed: between runs it is measured anew, under a run it is refused."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.data import DataError, JsonFile
from flowtrain_lightning.data.sources.index import index_table
from tests.data.support import (
    MEASURE,
    data_module,
    message_record,
    quiet_trainer,
    trained,
    write_image,
    write_records,
    write_set,
)


@pytest.fixture
def file(tmp_path):
    """Records with one image each, as BMP: all of one size have as many bytes."""
    for number in range(8):
        write_image(tmp_path / f"data/images/{number}.bmp", 8, 8, seed=number)
    records = [message_record(number, "ask", "answer", [f"images/{number}.bmp"]) for number in range(8)]
    return write_records(tmp_path / "data/d.jsonl", records)


@pytest.fixture
def scans(monkeypatch):
    """Counts how often a file is measured."""
    seen = []
    plain = JsonFile.locate
    monkeypatch.setattr(JsonFile, "locate", lambda store: seen.append(store.path) or plain(store))
    return seen


def rewrite(image, height=8):
    """Other pixels, in as many bytes where the height is the same."""
    before = image.stat()
    pixels = np.random.default_rng(99).integers(0, 256, (height, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("height", [8, 12])
def test_an_image_that_was_rewritten_under_a_run_is_refused_by_name(file, height):
    data = data_module(file, global_batch_size=4, shuffle=False)
    data.setup("fit")
    loader = data.train_dataloader()
    batches = iter(loader)
    rewrite(file.parent / "images/0.bmp", height)
    with pytest.raises(
        DataError, match=r"record 1 \(id 'r0'\): image .*0\.bmp was rewritten \(.* bytes then, .* now\)"
    ):
        list(batches)


def test_an_image_that_is_removed_or_broken_under_a_run_is_no_fault_of_the_record(file):
    data = data_module(file, global_batch_size=4, shuffle=False)
    data.setup("fit")
    loader = data.train_dataloader()
    image = file.parent / "images/0.bmp"
    for change, words in (
        (image.unlink, "is gone; it was removed after"),
        (lambda: image.write_text("no"), "rewritten"),
    ):
        change()
        with pytest.raises(DataError, match=words):
            list(iter(loader))


@pytest.mark.parametrize("height", [8, 12])
def test_an_image_that_was_rewritten_between_runs_is_measured_anew(file, scans, height, tmp_path):
    first = index_table(JsonFile(file), MEASURE, None)
    rewrite(file.parent / "images/3.bmp", height)
    second = index_table(JsonFile(file), MEASURE, None)
    assert len(scans) == 2
    assert (second.sizes.media_rows[3] != first.sizes.media_rows[3]) == (height == 12)
    assert len(trained(tmp_path, data_module(file), max_epochs=1)) == 2
    assert len(scans) == 2


def test_a_folder_that_was_moved_or_copied_with_its_times_is_not_measured_anew(file, scans, tmp_path):
    index_table(JsonFile(file), MEASURE, None)
    shutil.copytree(file.parent, tmp_path / "copy")
    file.parent.rename(tmp_path / "moved")
    for folder in ("copy", "moved"):
        index_table(JsonFile(tmp_path / folder / "d.jsonl"), MEASURE, None)
    assert len(scans) == 1


def test_images_of_any_name_are_compared(tmp_path, scans):
    names = ("größe.png", "a\nb.png", "../beside.png", str(tmp_path / "elsewhere.png"))
    for name in names:
        write_image(tmp_path / "data" / name, 8, 8)
    records = [message_record(number, "ask", "answer", [name]) for number, name in enumerate(names)]
    file = write_records(tmp_path / "data/d.jsonl", records)
    for name in names:
        for _ in range(2):
            index_table(JsonFile(file), MEASURE, None)
        rewrite(tmp_path / "data" / name)
    assert len(scans) == len(names)


def test_an_index_of_before_is_replaced(file, scans):
    index_table(JsonFile(file), MEASURE, None)
    (cache,) = (file.parent / ".flowtrain").iterdir()
    with np.load(cache) as kept:
        arrays = {name: kept[name] for name in kept.files if not name.startswith("media_found")}
    with cache.open("wb") as replaced:
        np.savez(replaced, **arrays)
    for _ in range(2):
        index_table(JsonFile(file), MEASURE, None)
    assert len(scans) == 2


def test_a_run_looks_at_the_files_of_media_once_on_each_machine(tmp_path, monkeypatch):
    file = write_set(tmp_path / "d.jsonl", 8)
    trained(tmp_path, data_module(file), max_epochs=1)
    looked = []
    plain = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: looked.append(str(path)) or plain(path, **how))
    data = data_module(file)
    data.trainer = quiet_trainer()
    data.prepare_data()
    compared = [path for path in looked if path.endswith(".png")]
    data.setup("fit")
    assert len(compared) == len(set(compared)) > 0
    assert [path for path in looked if path.endswith(".png")] == compared
