"""At every validation the model answers prompts; all layouts give the same answers, scores and tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics.text import CharErrorRate

from flowtrain_lightning.callbacks import EvaluateAnswers
from flowtrain_lightning.metrics import AnswerSimilarity
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of, trainer_for
from tests.forks import Job, read_down, run_jobs, write_down
from tests.lightning.wandb_file import read_history
from tests.tiny import TinyVLM, tiny_data, write_records

SAMPLES = 6
"""Which no step's number of samples divides."""


def train(folder: Path, *, data: str, layout: str, freeze_encoder: bool = False) -> None:
    """Trains two epochs; every rank writes down the scores that its callbacks see."""
    trainer = trainer_for(
        layout,
        precision="64-true",
        max_epochs=2,
        num_sanity_val_steps=1,
        logger=CSVLogger(folder, "log", ""),
        callbacks=[EvaluateAnswers(SAMPLES, {"anls": AnswerSimilarity(), "errors": CharErrorRate()})],
        default_root_dir=folder,
    )
    trainer.fit(TinyVLM(freeze_encoder=freeze_encoder), datamodule=tiny_data(Path(data), global_batch_size=4))
    write_down(folder, {name: float(value) for name, value in trainer.callback_metrics.items()})
    disconnect_groups()


RUNS = {
    "auto": {"layout": "auto"},
    "separate": {"layout": "1+1"},
    "two backbones, frozen": {"layout": "1+2", "freeze_encoder": True},
    "frozen": {"layout": "auto", "freeze_encoder": True},
    "colocated": {"layout": "colocated 2"},
    "ddp": {"layout": "ddp 2"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for stage, count in (("train", 12), ("val", 4), ("predict", 9)):
        write_records(folder, count, f"{stage}.jsonl", seed=count)
    return folder


@pytest.fixture(scope="module")
def run_of(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a run -> its folder; each is run once, when it is asked for."""

    @cache
    def folder(name: str) -> Path:
        arguments = {"data": str(data), **RUNS[name]}
        job = Job(name, f"{__name__}:train", ranks_of(str(RUNS[name]["layout"])), arguments)
        return run_jobs(tmp_path_factory.mktemp("runs"), [job])[name].check().folder

    return folder


def tables(folder: Path) -> dict[str, list[list[str]]]:
    found = {}
    for path in sorted(folder.rglob("answers/*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found[path.name] = list(csv.reader(file))
    return found


@pytest.mark.parametrize(
    ("run", "alone"),
    [
        ("separate", "auto"),
        ("colocated", "auto"),
        pytest.param("ddp", "auto", marks=pytest.mark.full),
        pytest.param("two backbones, frozen", "frozen", marks=pytest.mark.full),
    ],
)
def test_answers_and_scores_are_those_of_one_process(run_of, run, alone):
    (expected,) = read_down(run_of(alone))
    for seen in read_down(run_of(run)):
        assert seen["val_anls"] == expected["val_anls"]
        assert seen["val_errors"] == expected["val_errors"] > 0
    assert tables(run_of(run)) == tables(run_of(alone))


def test_without_a_logger_that_shows_tables_each_validation_writes_one(run_of):
    written = tables(run_of("auto"))
    assert list(written) == ["step-3.csv", "step-6.csv"], "none before the first step"
    head, *lines = written["step-3.csv"]
    assert head == ["id", "prompt", "answer", "truth"]
    assert [line[0] for line in lines] == [f"predict.jsonl-{number}" for number in range(SAMPLES)]
    assert all(line[1].endswith("what?") and line[3] for line in lines)


@pytest.mark.full
def test_weights_and_biases_and_tensorboard_show_pictures_answers_and_truths(tmp_path, data):
    loggers = [WandbLogger(save_dir=tmp_path, offline=True), TensorBoardLogger(tmp_path, "board")]
    trainer = trainer_for(
        "auto", max_epochs=1, logger=loggers, callbacks=[EvaluateAnswers(3)], default_root_dir=tmp_path
    )
    trainer.fit(TinyVLM(), datamodule=tiny_data(data, global_batch_size=4))
    loggers[0].experiment.finish()
    (line,) = (line for line in read_history(tmp_path) if "answers.path" in line)
    assert (line["answers.nrows"], line["trainer/global_step"]) == (3, 2)
    (table,) = tmp_path.rglob(f"files/{line['answers.path']}")
    written = json.loads(table.read_text())
    assert written["columns"] == ["id", "prompt", "answer", "truth", "pictures"]
    assert [row[-1] for row in written["data"]] == ["Image"] * 3  # by their kind: pixels go into the run's artifact
    (events,) = (tmp_path / "board").rglob("events*")
    tags = EventAccumulator(str(events)).Reload().Tags()
    assert "answers/text_summary" in tags["tensors"]
    assert any(tag.startswith("answers/predict.jsonl-") for tag in tags["images"])
    assert {"val_exact_match", "val_anls"} <= trainer.callback_metrics.keys()


def test_without_prompts_the_run_is_refused(tmp_path, data):
    trainer = trainer_for("auto", max_steps=1, callbacks=[EvaluateAnswers()], default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"FlowDataModule\(predict='val.jsonl'"):
        trainer.fit(TinyVLM(), datamodule=tiny_data(data, predict=None))
    with pytest.raises(ValueError, match="samples is 0; it must be at least 1"):
        EvaluateAnswers(0)
