"""What `fit` left in mid-epoch goes on in mid-epoch, whoever saved it when, from files and streams alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flowtrain_lightning import FlowCheckpointIO, FlowTrainStrategy, export_checkpoint
from flowtrain_lightning.data import TokenSteps
from tests.data.shards import write_tar
from tests.tiny import TinyVLM, tiny_data, write_records

STOP, END = 2, 6
"""An epoch has 5 steps of samples: the first run ends in its middle, the second one in the middle of the next."""


class Stream:
    """Rows with their images inside, which can be read in order only."""

    def __init__(self, file: Path) -> None:
        self.rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in self.rows:
            images = [(file.parent / image["path"]).read_bytes() for image in row["images"]]
            row["images"] = [{"bytes": content, "path": None} for content in images]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        turn = 5 * self.epoch % len(self.rows)
        yield from self.rows[turn:] + self.rows[:turn]


def tar(file: Path) -> Path:
    members = {}
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        images = row.pop("images")
        members[f"{number:04}.json"] = json.dumps(row).encode()
        for k, image in enumerate(images):
            members[f"{number:04}.{k}.png"] = (file.parent / image["path"]).read_bytes()
    return write_tar(file.with_suffix(".tar"), members)


SOURCES = {"files": Path, "tar": tar, "stream": Stream}


class Notes(L.Callback):
    """Loss and samples of each step, validation losses, and the steps under which batches are logged."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        self.validations: dict[int, float] = {}
        self.logged: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.logged.append(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.validations[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.steps[trainer.global_step] = [batch.epoch, batch.plan.samples.tolist(), float(outputs["loss"]), rates]


class Stateless(TinyVLM):
    """A new optimizer, which Lightning makes for each ``fit``, is like the former one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plateau(TinyVLM):
    """A schedule that a second count of a validation would move."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=1e9)
        rule = {"scheduler": scheduler, "interval": "step", "frequency": 1, "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": rule}


class Run:
    """One module and Trainer on given data."""

    def __init__(self, folder: Path, data: Any, *callbacks: L.Callback, kind: type[TinyVLM] = TinyVLM, **settings: Any):
        L.seed_everything(7, verbose=False)
        self.notes, self.module, self.data = Notes(), kind(dropout=0.1), data
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        given = {"strategy": FlowTrainStrategy(placement="colocated"), "enable_checkpointing": bool(callbacks)}
        bounds = {"max_steps": END, "max_epochs": -1, "num_sanity_val_steps": 0, "default_root_dir": folder}
        self.trainer = L.Trainer(
            accelerator="cpu", devices=1, callbacks=[self.notes, *callbacks], **(quiet | given | bounds | settings)
        )

    def fit(self, checkpoint: Any = None) -> Run:
        self.trainer.fit(self.module, self.data(), ckpt_path=checkpoint)
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.module.state_dict().items()}


def assert_goes_on(whole: Run, rest: Run, first: int = STOP + 1) -> None:
    assert rest.notes.steps == {step: noted for step, noted in whole.notes.steps.items() if step >= first}
    other = rest.weights
    assert all(torch.equal(weight, other[name]) for name, weight in whole.weights.items())
    assert rest.trainer.current_epoch == whole.trainer.current_epoch
    assert rest.trainer.fit_loop.total_batch_idx == whole.trainer.fit_loop.total_batch_idx


def build(folder: Path, source: str, **changes: Any) -> Any:
    """Makes a data module, always of the same records; validation where there is a file for it."""
    file = folder / "data" / "train.jsonl"
    if not file.exists():
        write_records(file.parent, 20)
        write_records(file.parent, 4, "val.jsonl", seed=1)
    return lambda: tiny_data(file.parent, **{"global_batch_size": 4, "train": SOURCES[source](file), **changes})


TOKENS = {"token_steps": TokenSteps(microbatches=2)}
CASES = [
    pytest.param("files", {}, id="files"),
    pytest.param("stream", {}, id="stream"),
    pytest.param("tar", {}, id="tar", marks=pytest.mark.full),
    pytest.param("files", TOKENS, id="token steps", marks=pytest.mark.full),
    pytest.param("stream", TOKENS, id="token steps of a stream", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("source", "changes"), CASES)
def test_what_is_saved_when_fit_has_ended_goes_on_with_the_very_next_sample(tmp_path, source, changes):
    data = build(tmp_path, source, **changes)
    whole = Run(tmp_path, data, limit_val_batches=0).fit()
    keeper = ModelCheckpoint(tmp_path / "kept", save_last=True)
    first = Run(tmp_path, data, keeper, limit_val_batches=0, max_steps=STOP).fit()
    first.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert first.trainer.current_epoch == 1, "as Lightning counts"
    for saved in (tmp_path / "after.ckpt", tmp_path / "kept" / "last.ckpt"):
        assert_goes_on(whole, Run(tmp_path, data, limit_val_batches=0).fit(saved))


SECOND = [CASES[1], *(pytest.param(*case.values, id=f"{case.id}, long", marks=pytest.mark.full) for case in CASES)]


@pytest.mark.parametrize(("source", "changes"), SECOND)
def test_a_second_fit_of_the_same_trainer_goes_on_with_the_very_next_sample(tmp_path, source, changes):
    data = build(tmp_path, source, **changes)
    whole = Run(tmp_path, data, kind=Stateless, limit_val_batches=0).fit()
    both = Run(tmp_path, data, kind=Stateless, limit_val_batches=0, max_steps=STOP).fit()
    both.trainer.fit_loop.epoch_loop.max_steps = END
    assert_goes_on(whole, both.fit(), first=1)


def test_a_second_fit_on_other_data_begins_with_their_first_epoch(tmp_path):
    data, other = build(tmp_path, "files"), build(tmp_path, "files", seed=5)
    both = Run(tmp_path, data, limit_val_batches=0, max_steps=STOP).fit()
    both.trainer.fit_loop.epoch_loop.max_steps, both.data = 2 * STOP, other
    both.fit()
    assert [epoch for epoch, *_ in both.notes.steps.values()] == [0, 0, 1, 1], "as Lightning counts"


def test_neither_a_validation_that_was_due_nor_its_schedule_is_repeated(tmp_path):
    data = build(tmp_path, "files")
    settings = {"val_check_interval": STOP, "check_val_every_n_epoch": None, "kind": Plateau}
    whole = Run(tmp_path, data, **settings).fit()
    first = Run(tmp_path, data, max_steps=STOP, **settings).fit()
    first.trainer.save_checkpoint(tmp_path / "after.ckpt")
    rest = Run(tmp_path, data, **settings).fit(tmp_path / "after.ckpt")
    assert_goes_on(whole, rest)
    assert {**first.notes.validations, **rest.notes.validations} == whole.notes.validations
    assert rest.notes.logged == [step for step in whole.notes.logged if step >= STOP]


class SaveAtTheEnd(L.Callback):
    """Saves in each hook at the end of the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: L.Trainer, moment: str) -> None:
        if trainer.global_step == STOP:
            trainer.save_checkpoint(self.folder / f"{moment}.ckpt")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "batch")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "end")


@pytest.mark.parametrize("source", ["files", pytest.param("stream", marks=pytest.mark.full)])
def test_an_epoch_that_ended_with_fit_is_whole_whichever_hook_saved_it(tmp_path, source):
    data = build(tmp_path, source)
    settings = {"limit_val_batches": 0, "limit_train_batches": STOP}
    whole = Run(tmp_path, data, **settings).fit()
    first = Run(tmp_path, data, SaveAtTheEnd(tmp_path), max_steps=STOP, **settings).fit()
    first.trainer.save_checkpoint(tmp_path / "after.ckpt")
    for moment in ("batch", "epoch", "end", "after"):
        rest = Run(tmp_path, data, **settings).fit(tmp_path / f"{moment}.ckpt")
        assert_goes_on(whole, rest)
        assert rest.notes.logged == [step for step in whole.notes.logged if step >= STOP], moment


BOUNDS = [{}, {"limit_train_batches": 6}, pytest.param({"max_epochs": 2, "max_steps": -1}, marks=pytest.mark.full)]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_what_a_streams_last_batch_saved_goes_on_with_the_next_epochs_first(tmp_path, bounds):
    data = build(tmp_path, "stream")
    settings = {"max_steps": 10, "val_check_interval": 2, **bounds}
    keeper = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole = Run(tmp_path, data, keeper, **settings).fit()
    assert [*whole.notes.validations] == [2, 4, 7, 9], "an epoch has 5 steps, which nobody knows"
    rest = Run(tmp_path, data, **settings).fit(tmp_path / "kept" / "step=5.ckpt")
    assert_goes_on(whole, rest, first=6)
    assert rest.notes.validations == {step: loss for step, loss in whole.notes.validations.items() if step > 5}
    assert rest.notes.logged == [step for step in whole.notes.logged if step >= 5]


@pytest.mark.parametrize("saved", [3, 5])
def test_a_streams_epoch_ends_with_the_stream_where_a_limit_would_let_it_go_on(tmp_path, saved):
    data = build(tmp_path, "stream")
    settings = {"limit_val_batches": 0, "limit_train_batches": 8, "max_steps": 11}
    keeper = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=saved, save_top_k=-1)
    whole = Run(tmp_path, data, keeper, **settings).fit()
    assert [epoch for epoch, *_ in whole.notes.steps.values()] == [0] * 5 + [1] * 5 + [2]
    for limit in (8, 1.0):  # the second knows no limit
        settings["limit_train_batches"] = limit
        rest = Run(tmp_path, data, **settings).fit(tmp_path / "kept" / f"step={saved}.ckpt")
        assert_goes_on(whole, rest, first=saved + 1)


@pytest.mark.parametrize("plain", [pytest.param(False, marks=pytest.mark.full), True])
def test_plain_lightning_goes_on_in_mid_epoch_from_it_too_and_back(tmp_path, plain):
    data = build(tmp_path, "files")
    auto = {"strategy": "auto", "plugins": [FlowCheckpointIO()], "limit_val_batches": 0}
    whole = Run(tmp_path, data, limit_val_batches=0).fit()
    first = Run(tmp_path, data, max_steps=STOP, **(auto if plain else {"limit_val_batches": 0})).fit()
    saved = tmp_path / "after.ckpt"
    first.trainer.save_checkpoint(saved)
    if not plain:
        export_checkpoint(saved, tmp_path / "plain.ckpt")
        saved = tmp_path / "plain.ckpt"
    for settings in (auto, {"limit_val_batches": 0}):
        rest = Run(tmp_path, data, **settings).fit(saved)
        samples = {step: noted[:2] for step, noted in rest.notes.steps.items()}
        assert samples == {step: noted[:2] for step, noted in whole.notes.steps.items() if step > STOP}
