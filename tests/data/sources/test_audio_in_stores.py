"""The same clip by every way: messages, columns, tar shards, Parquet, data sets and streams; bad ones are named."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile

from flowtrain_lightning.data import (
    AudioProcessor,
    Columns,
    DataError,
    FlowDataModule,
    IndexConfig,
    IndexedSource,
    JsonFile,
    ParquetFile,
)
from flowtrain_lightning.data.sources.measuring import Unreadable
from tests.data.shards import write_tar
from tests.data.support import IMAGES, MEASURE, TEMPLATE, Letters, write_image

AUDIO = AudioProcessor(sample_rate=8000, frame_samples=10, frames_per_row=4, max_seconds=1.0)
RATE, SAMPLES, ROWS = 8000, 100, 3
HEARS = {"audio_token": "<S>", "before_audio": "(", "after_audio": ")"}
ANSWER = {"role": "assistant", "content": "hm"}


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, SAMPLES)
    soundfile.write(tmp_path / "a.wav", samples, RATE)
    return tmp_path / "a.wav"


def data_of(train: Any, **settings: Any) -> FlowDataModule:
    template = type(TEMPLATE)(**{**vars(TEMPLATE), **HEARS})
    given = {"tokenizer": Letters(), "template": template, "images": IMAGES, "audio": AUDIO, "seed": 1}
    return FlowDataModule(train, token_budget=200, global_batch_size=1, **{**given, **settings})


def source_of(path: Path, unreadable: Unreadable = "error") -> IndexedSource:
    template = type(TEMPLATE)(**{**vars(TEMPLATE), **HEARS})
    measure = replace(MEASURE, template=template, audio=AUDIO, unreadable=unreadable)
    return IndexedSource(JsonFile(path), measure, 200, IndexConfig(unreadable=unreadable))


def heard(train: Any, **settings: Any) -> tuple[list[int], np.ndarray, int]:
    """Tokens, frames and rows of the first clip of the first step of some data."""
    data = data_of(train, **settings)
    data.setup("fit")
    step = next(iter(data.train_dataloader()))
    (media,) = (media for batch in step.media.values() for media in batch if media.modality == "audio")
    (batch,) = step.microbatches
    np.testing.assert_array_equal(
        batch.tokens[batch.media_positions["audio"]].tolist(), [2] * len(batch.media_positions["audio"])
    )
    return batch.tokens.tolist(), media.patches.numpy(), media.rows[0]


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, ANSWER]


TOKENS = [1, 3, *map(ord, "("), *[2] * ROWS, *map(ord, ")q"), 5, 4, *map(ord, "hm"), 5]


def forms(clip: Path) -> dict[str, dict[str, Any]]:
    address = "data:audio/wav;base64," + base64.b64encode(clip.read_bytes()).decode()
    said = {"type": "text", "text": "q"}
    return {
        "a part with a path": {"messages": user([{"type": "audio", "path": "a.wav"}, said])},
        "a part with audio": {"messages": user([{"type": "audio", "audio": "a.wav"}, said])},
        "a part with audio_url": {"messages": user([{"type": "audio_url", "audio_url": {"url": "a.wav"}}, said])},
        "a marker": {"audios": ["a.wav"], "messages": user("<audio>q")},
        "no marker": {"audio": "a.wav", "messages": user("q")},
        "an address that holds it": {"audio": address, "messages": user("<audio>q")},
        "LLaVA's": {
            "audio": "a.wav",
            "conversations": [{"from": "human", "value": "<audio>q"}, {"from": "gpt", "value": "hm"}],
        },
    }


@pytest.mark.parametrize("form", list(forms(Path(__file__))))
def test_a_clip_stands_where_its_record_says(tmp_path: Path, clip: Path, form: str):
    tokens, frames, rows = heard(lines(tmp_path / "d.jsonl", forms(clip)[form]))
    assert tokens == TOKENS
    assert rows == ROWS
    expected, _ = soundfile.read(clip, dtype="float32")
    np.testing.assert_array_equal(frames.flatten(), np.pad(expected, (0, 20)))


def rows_with(clip: Path) -> list[dict[str, Any]]:
    return [{"audio": {"bytes": clip.read_bytes(), "path": "a.wav"}, "question": "q", "answer": "hm"}]


def stores(folder: Path, clip: Path) -> dict[str, Any]:
    turns = json.dumps({"messages": user("<audio>q")}).encode()
    # Cast, since to encode sound datasets needs a library that is not needed to read it here.
    rows = datasets.Dataset.from_list(rows_with(clip)).cast_column("audio", datasets.Audio())
    rows.to_parquet(folder / "d.parquet")
    return {
        "a tar shard": (write_tar(folder / "d.tar", {"0.json": turns, "0.wav": clip.read_bytes()}), None),
        "Parquet": (folder / "d.parquet", Columns("question", "answer", audio="audio")),
        "a data set": (rows, Columns("question", "answer", audio="audio")),
        "a stream": (rows.to_iterable_dataset(), Columns("question", "answer", audio="audio")),
    }


@pytest.mark.parametrize("store", ["a tar shard", "Parquet", "a data set", "a stream"])
def test_a_clip_lies_in_every_kind_of_store_and_is_never_decoded_by_it(tmp_path: Path, clip: Path, store: str):
    train, columns = stores(tmp_path, clip)[store]
    tokens, frames, rows = heard(train, columns=columns, index=IndexConfig(cache_dir=tmp_path / "index"))
    assert (tokens, rows) == (TOKENS, ROWS)
    expected, _ = soundfile.read(clip, dtype="float32")
    np.testing.assert_array_equal(frames.flatten(), np.pad(expected, (0, 20)))


def test_images_and_clips_of_one_record_keep_their_order_and_their_modalities(tmp_path: Path, clip: Path):
    image = write_image(tmp_path / "images/0.png", 4, 8)
    parts = [{"type": "audio", "path": "a.wav"}, {"type": "image", "path": image}, {"type": "audio", "path": "a.wav"}]
    sizes = source_of(lines(tmp_path / "d.jsonl", {"messages": user(parts)})).sizes(np.array([0]))
    assert sizes.media_modality.tolist() == ["audio", "image", "audio"]
    first, _, last = sizes.media_content.tolist()
    assert first == last != -1
    again = source_of(tmp_path / "d.jsonl")  # by the index that is kept
    assert again.sizes(np.array([0])).media_modality.tolist() == ["audio", "image", "audio"]


BAD = {
    "empty": (b"", "audio .*bad.wav cannot be used: it is empty"),
    "no sound": (b"no sound", "audio .*bad.wav cannot be used: it is no audio that can be read"),
    "too long": (RATE + 1, "audio .*bad.wav cannot be used: it lasts 1.0 s, longer than max_seconds=1"),
    "cut": (-200, "audio .*bad.wav cannot be used: it is damaged"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_clip_that_cannot_be_used_is_named_with_its_record_or_left_out(tmp_path: Path, clip: Path, how: str):
    content, words = BAD[how]
    bad = tmp_path / "bad.wav"
    if isinstance(content, bytes):
        bad.write_bytes(content)
    else:
        soundfile.write(bad, np.zeros(max(content, SAMPLES)), RATE)
        bad.write_bytes(bad.read_bytes()[: min(content, -1) if content < 0 else None])
    path = lines(tmp_path / "d.jsonl", *({"audio": name, "messages": user("q")} for name in ("bad.wav", "a.wav")))
    with pytest.raises(DataError, match=f"d.jsonl, record 1: {words}"):
        data_of(path).setup("fit")
    assert len(source_of(path, unreadable="drop")) == 1


REFUSED = {
    "a module that does not hear": ({"audio": "a.wav"}, {"audio": None}, "it has audio, but nothing says what becomes"),
    "two names": ({"audio": "a.wav", "audios": ["a.wav"]}, {}, "'audios' and 'audio'; name all audios in one of them"),
    "another name": ({"audio_path": "a.wav"}, {}, "'audio_path', which is not read; name audios as 'audios'"),
    "sound that is not read": ({"noise": "a.wav"}, {}, "holds 'noise' with the path 'a.wav', which is not read"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_sound_is_never_passed_over_in_silence(tmp_path: Path, clip: Path, how: str):
    fields, settings, words = REFUSED[how]
    with pytest.raises(DataError, match=words):
        data_of(lines(tmp_path / "d.jsonl", {**fields, "messages": user("q")}), **settings).setup("fit")


def test_sound_beside_a_record_of_a_shard_is_read_or_refused(tmp_path: Path, clip: Path):
    turns = json.dumps({"text": "abc"}).encode()
    shard = write_tar(tmp_path / "d.tar", {"0.json": turns, "0.wav": clip.read_bytes()})
    with pytest.raises(DataError, match=r"'0\.wav' lies beside it in the shard, but is not read"):
        data_of(shard).setup("fit")


def test_a_vocabulary_without_the_token_of_sound_is_refused(tmp_path: Path, clip: Path):
    record = {"audio": "a.wav", "messages": user("q")}
    template = type(TEMPLATE)(**{**vars(TEMPLATE), "audio_token": "<|hm|>"})
    with pytest.raises(ValueError, match=r"no token '<\|hm\|>', which stands for features of audio"):
        data_of(lines(tmp_path / "d.jsonl", record), template=template).setup("fit")


def test_parquet_columns_of_sound_are_bytes(tmp_path: Path, clip: Path):
    stores(tmp_path, clip)
    store = ParquetFile(tmp_path / "d.parquet", columns=Columns("question", "answer", audio="audio"))
    (record,) = store.records(0, np.array(list(store.locate())))
    assert [str(item) for item in record.audios] == ["a.wav"]
    assert record.bytes_inside == clip.stat().st_size
