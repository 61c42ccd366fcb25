"""Videos in tar shards, Parquet, data sets and streams train as the same videos in files, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("av")
pytest.importorskip("datasets")

from flowtrain_lightning.data import DataError, FlowDataModule
from tests.exactness.compare import error, read_run, same_bits
from tests.exactness.data import STEPS
from tests.forks import Job, run_jobs
from tests.models.clips import write_video_records
from tests.models.video_stores import WRITE, store_data
from tests.tiny_videos import write_clip

FAMILY, LAYOUT, MIDDLE = "qwen2_5_vl", "1+1", 3
TRAINED = ("files", "shard", "parquet", "stream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    write_video_records(folder, 6 * STEPS)
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, str]:
    """Where each kind of store lies."""
    return {kind: str(write(folder / "train.jsonl")) for kind, write in WRITE.items()}


def test_steps_from_every_store_have_the_same_tokens_and_pixels_as_from_files(folder, written):
    loaders = {}
    for kind in written:
        data = store_data(folder, written[kind], kind, FAMILY, token_budget=256)
        data.setup("fit")
        loaders[kind] = data.train_dataloader()
    steps = 0
    for batches in zip(*loaders.values(), strict=True):
        steps += 1
        of_files, *others = batches
        for batch in others:
            for found, expected in zip(batch.microbatches, of_files.microbatches, strict=True):
                assert found.tokens.equal(expected.tokens)
                assert found.labels.equal(expected.labels)
                assert found.cu_seqlens.equal(expected.cu_seqlens)
            for found, expected in zip(batch.media["encoder"], of_files.media["encoder"], strict=True):
                assert found.pixels.equal(expected.pixels)
                assert found.clips == expected.clips
    assert steps == STEPS


@pytest.mark.full
def test_runs_on_every_kind_of_store_are_those_on_files_also_once_resumed(folder, written):
    store_data(folder, written["files"], "files", FAMILY).setup("fit")  # writes what the family reads
    arguments = {"data": str(folder), "layout": LAYOUT, "family": FAMILY, "middle": MIDDLE}
    arguments |= {"written": {kind: written[kind] for kind in TRAINED}}
    job = Job("runs", "tests.models.video_stores:train_on_stores", 2, arguments)
    runs = run_jobs(folder, [job])["runs"].check().folder
    expected = read_run(runs / "files")
    assert len(expected.losses) == STEPS
    for kind in TRAINED[1:]:
        found, again = read_run(runs / kind), read_run(runs / f"{kind} again")
        assert same_bits(found, expected), kind
        assert found.microbatches == expected.microbatches
        assert found.encoder_batches == expected.encoder_batches
        assert again.losses == expected.losses[MIDDLE:], kind
        assert error(again.weights[-1], expected.weights[-1]) == 0.0, kind


WHERE = {
    "files": r"train\.jsonl",
    "shard": r"train\.tar",
    "parquet": r"train\.parquet",
    "stream": "stream IterableDataset",
}
"""How records are named in what is said of them; those of a data set by its name, which here it has none of."""


def test_a_video_that_cannot_be_used_is_named_in_every_kind_of_store_or_left_out(tmp_path):
    file = write_video_records(tmp_path, 6)
    write_clip(tmp_path / "short.mkv", 1, 8, 8, 1)
    for content, words, kinds in (
        (b"no video", "it is no video that can be read", [*WRITE]),
        (b"", "it is empty", ["files"]),
        ((tmp_path / "short.mkv").read_bytes(), "it has 1 frames, but the encoder takes 2 together", ["shard"]),
    ):
        (tmp_path / "1.mkv").write_bytes(content)  # which the last two records have
        for kind in kinds:
            shutil.rmtree(tmp_path / "train.dataset", ignore_errors=True)
            given = str(WRITE[kind](file)), kind, FAMILY
            match = rf"{WHERE.get(kind, 'data set')}.*, record 5( \(id .*\))?: video .*1\.mkv cannot be used: {words}"
            with pytest.raises(DataError, match=match):
                samples_of(store_data(tmp_path, *given))
            assert len(samples_of(store_data(tmp_path, *given, unreadable="drop", global_batch_size=2))) == 4, kind


def samples_of(data: FlowDataModule) -> list[int]:
    """All that an epoch has."""
    data.setup("fit")
    return [sample for batch in data.train_dataloader() for sample in batch.plan.samples.tolist()]
