"""The same images and videos in files, a tar shard, Parquet, data sets and streams, and a training on each of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from flowtrain_lightning.data import FlowDataModule, IndexConfig
from flowtrain_lightning.data.sources.measuring import Unreadable
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.data.shards import write_tar
from tests.exactness.data import STEPS
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Recorder
from tests.models.clips import video_data, video_family
from tests.models.training import SaveAfter

Record = dict[str, Any]


def write_shard(file: Path) -> Path:
    """A tar shard in which a record names what lies beside it by its ending."""
    members = {}
    for number, record in enumerate(_records(file)):
        members[f"a/{number:03}.json"] = json.dumps(record).encode()
        members |= {f"a/{number:03}.{name}": (file.parent / name).read_bytes() for name in _named(record)}
    return write_tar(file.with_suffix(".tar"), members)


def write_parquet(file: Path) -> Path:
    """A Parquet file in which the parts of a content hold their images and videos."""
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([_within(record, file.parent) for record in _records(file)]),
        file.with_suffix(".parquet"),
        row_group_size=7,
    )
    return file.with_suffix(".parquet")


def write_dataset(file: Path) -> Path:
    """A data set with columns of images and videos beside the turns, on disk."""
    turns = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
    media = {"images": datasets.List(datasets.Image()), "videos": datasets.List(datasets.Video())}
    features = datasets.Features({**media, "messages": turns})
    rows = [_beside(record, file.parent) for record in _records(file)]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(file.with_suffix(".dataset"))
    return file.with_suffix(".dataset")


def opened_stream(folder: Path) -> Any:
    """The rows of a data set in order, as if their number were not known."""
    return datasets.load_from_disk(folder).to_iterable_dataset(num_shards=2)


WRITE: dict[str, Callable[[Path], Path]] = {
    "files": lambda file: file,
    "shard": write_shard,
    "parquet": write_parquet,
    "dataset": write_dataset,
    "stream": write_dataset,
}
OPEN: dict[str, Callable[[Path], Any]] = {"dataset": datasets.load_from_disk, "stream": opened_stream}
"""How what was written is opened, where its path is not enough."""


def store_data(
    folder: Path, written: str, kind: str, family: str, unreadable: Unreadable = "error", **settings: Any
) -> FlowDataModule:
    """The records of one kind of store."""
    source = OPEN.get(kind, Path)(Path(written))
    index = IndexConfig(unreadable=unreadable, cache_dir=folder / "index")
    return video_data(folder, family, train=source, index=index, **settings)


def train_on_stores(folder: Path, *, data: str, written: dict[str, str], layout: str, family: str, middle: int) -> None:
    """Trains on one kind of store after another, and goes on from the middle of all these runs but that on files."""
    tiny = video_family(family)

    def fit(kind: str, run: Path, resumes: Path | None = None) -> None:
        run.mkdir(exist_ok=True)
        recorder = Recorder()
        trainer = trainer_for(
            layout,
            precision="64-true",
            max_steps=STEPS,
            limit_val_batches=0,
            callbacks=[recorder, SaveAfter(middle, run / "middle.ckpt")],
            default_root_dir=run,
        )
        given = store_data(Path(data), written[kind], kind, family, token_budget=256)
        trainer.fit(tiny.kind(tiny.config, lr=1e-2, weight_decay=0.1), datamodule=given, ckpt_path=resumes)
        recorder.save(run)

    for kind in written:
        fit(kind, folder / kind)
        if kind != "files":
            fit(kind, folder / f"{kind} again", folder / kind / "middle.ckpt")
    disconnect_groups()


def _records(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _named(record: Record) -> Iterable[str]:
    """The files of a record, in order."""
    for part in record["messages"][0]["content"]:
        if part["type"] != "text":
            yield part[part["type"]]


def _within(record: Record, folder: Path) -> Record:
    """The record with its files' bytes in the parts that name them."""

    def part(given: Record) -> Record:
        kind = given["type"]
        return given if kind == "text" else {"type": kind, kind: _content(folder / given[kind])}

    asked, said = record["messages"]
    contents = [[part(given) for given in asked["content"]], [{"type": "text", "text": said["content"]}]]
    turns = zip((asked, said), contents, strict=True)
    return {"messages": [{"role": turn["role"], "content": content} for turn, content in turns]}


def _beside(record: Record, folder: Path) -> Record:
    """The record with its files' bytes beside the turns, in which markers stand for them."""
    asked, said = record["messages"]
    text = "".join(part.get("text", f"<{part['type']}>") for part in asked["content"])
    parts = [part for part in asked["content"] if part["type"] != "text"]
    found = {
        kind: [_content(folder / part[kind]) for part in parts if part["type"] == kind] for kind in ("image", "video")
    }
    turns = [{"role": "user", "content": text}, said]
    return {"messages": turns, "images": found["image"], "videos": found["video"]}


def _content(path: Path) -> dict[str, Any]:
    return {"bytes": path.read_bytes(), "path": path.name}
