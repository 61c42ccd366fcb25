"""Averages of weights are those of Lightning's own callback on every layout, and go on from a checkpoint to the bit."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from flowtrain_lightning import export_checkpoint
from flowtrain_lightning.callbacks import AverageWeights
from flowtrain_lightning.checkpoint import read_checkpoint
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.checkpoint.test_resume import same
from tests.exactness.compare import error
from tests.exactness.data import STEPS, steps_data, write_steps
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.modules import Divided
from tests.exactness.train import weights_of
from tests.forks import Done, Job, run_jobs

DECAY = 0.7
SAVED_AT = 3
THAWED_AT = 1


class Thaw(L.Callback):
    """Lets the encoder train from a step on."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= THAWED_AT:
            pl_module.encoder.requires_grad_(True)


class Notes(L.Callback):
    """Keeps validation losses and the weights after each step, and saves a checkpoint on the way.

    Args:
        folder: where ``saved.ckpt`` is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.validations: list[float] = []
        self.weights: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights.append(weights_of(pl_module))
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validations.append(float(trainer.callback_metrics["val_loss"]))


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    precision: str = "64-true",
    roles: dict[str, Any] | None = None,
    by_lightning: bool = False,
    decay: float | None = DECAY,
    resume: str | None = None,
    thaws: bool = False,
) -> None:
    """Trains, validating every two steps; every rank writes down what it saw and what it ended with."""
    notes = Notes(folder)
    average = EMAWeightAveraging(decay=DECAY) if by_lightning else AverageWeights(decay)
    trainer = trainer_for(
        layout,
        strategy={"roles": roles} if roles else None,
        precision=precision,
        max_steps=STEPS,
        val_check_interval=2,
        callbacks=[average, notes, *([Thaw()] if thaws else [])],
        default_root_dir=folder,
    )
    module = Divided(lr=1e-3, freeze_encoder=thaws)
    trainer.fit(module, datamodule=steps_data(Path(data)), ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    seen = {"averages": weights_of(module), "steps": notes.weights, "validations": notes.validations}
    torch.save(seen, folder / f"rank{trainer.global_rank}.pt")
    disconnect_groups()


SHARDED = {"encoder": {"shard": "fsdp"}, "backbone": {"shard": "fsdp"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    # in the precision in which Lightning's callback, which builds the module itself, builds it
    "by Lightning": {"layout": "auto", "by_lightning": True, "precision": "32-true"},
    "auto, 32 bits": {"layout": "auto", "precision": "32-true"},
    "auto": {"layout": "auto"},
    "separate": {"layout": "1+1"},
    "shards": {"layout": "colocated 2", "roles": SHARDED},
    "thawed by Lightning": {"layout": "auto", "by_lightning": True, "precision": "32-true", "thaws": True},
    "thawed": {"layout": "1+1", "precision": "32-true", "thaws": True},
}


def job(name: str, data: str, **arguments: Any) -> Job:
    of_layout = {"data": data, **LAYOUTS[name], **arguments}
    label = f"{name} resumed" if "resume" in arguments else name
    return Job(label, f"{__name__}:train", ranks_of(of_layout["layout"]), of_layout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each layout's run, and some that went on from a checkpoint: of their own layout, or of another."""
    folder = tmp_path_factory.mktemp("averages")
    write_steps(folder / "data")
    data = str(folder / "data")
    done = run_jobs(folder, [job(name, data) for name in LAYOUTS])
    separate, shards, thawed = (done[name].check().folder / "saved.ckpt" for name in ("separate", "shards", "thawed"))
    plain = folder / "plain.ckpt"
    export_checkpoint(shards, plain)
    jobs = [
        job("separate", data, resume=str(separate)),
        job("shards", data, resume=str(separate)),
        job("thawed", data, resume=str(thawed)),
        job("by Lightning", data, resume=str(plain), precision="64-true"),
    ]
    return done | run_jobs(folder, jobs)


def ranks(done: Done) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [torch.load(path, weights_only=True) for path in sorted(done.check().folder.glob("rank*.pt"))]


def averages(done: Done) -> dict[str, torch.Tensor]:
    return {name: value for rank in ranks(done) for name, value in rank["averages"].items()}


def validations(done: Done) -> list[float]:
    first, *others = (rank["validations"] for rank in ranks(done))
    assert all(other == first for other in others)
    return first


def test_alone_they_are_those_of_lightnings_callback_to_the_bit(runs):
    assert same(averages(runs["auto, 32 bits"]), averages(runs["by Lightning"]))
    assert validations(runs["auto, 32 bits"]) == validations(runs["by Lightning"])


def test_a_weight_that_trains_from_a_step_on_has_the_average_of_lightnings_callback(runs):
    assert error(averages(runs["thawed"]), averages(runs["thawed by Lightning"])) <= 1e-5


def test_a_resumed_run_goes_on_with_averages_of_weights_that_were_frozen_at_first(runs):
    assert same(averages(runs["thawed resumed"]), averages(runs["thawed"]))


def test_they_are_what_the_formula_says(runs):
    (rank,) = ranks(runs["auto"])
    by_hand = {
        name: reduce(lambda average, new: DECAY * average + (1 - DECAY) * new, [step[name] for step in rank["steps"]])
        for name in rank["averages"]
    }
    assert error(rank["averages"], by_hand) <= 1e-15


@pytest.mark.parametrize("layout", ["separate", "shards"])
def test_halves_and_shards_have_the_averages_of_one_process(runs, layout):
    assert error(averages(runs[layout]), averages(runs["auto"])) <= 1e-9
    assert validations(runs[layout]) == pytest.approx(validations(runs["auto"]), rel=1e-9)


def test_a_resumed_run_has_the_averages_of_one_without_a_break_to_the_bit(runs):
    assert same(averages(runs["separate resumed"]), averages(runs["separate"]))


def test_shards_go_on_from_the_checkpoint_of_halves(runs):
    assert error(averages(runs["shards resumed"]), averages(runs["auto"])) <= 1e-9


def test_lightnings_callback_goes_on_from_the_exported_checkpoint_of_shards(runs):
    assert error(averages(runs["by Lightning resumed"]), averages(runs["auto"])) <= 1e-6  # its averages have 32 bits


def test_the_averages_are_what_a_checkpoint_is_opened_with(runs):
    folder = runs["separate"].folder
    opened = dict(Divided.load_from_checkpoint(folder / "last.ckpt").named_parameters())
    assert error({name: weight.detach().double() for name, weight in opened.items()}, averages(runs["separate"])) < 1e-6
    saved = read_checkpoint(folder / "saved.ckpt")
    current = {name: step for rank in ranks(runs["separate"]) for name, step in rank["steps"][SAVED_AT - 1].items()}
    assert same({name: saved["current_model_state"][name] for name in current}, current)
    assert not same(saved["state_dict"], saved["current_model_state"])


def test_equal_weights_for_all_steps_give_the_mean():
    trainer, module = _Trainer(), torch.nn.Linear(1, 1, bias=False)
    average = AverageWeights(decay=None, update_starting_at_step=1)
    for step, weight in enumerate((5.0, 1.0, 2.0, 6.0)):
        torch.nn.init.constant_(module.weight, weight)
        trainer.global_step = step + 1
        average.on_train_batch_end(trainer, module, None, None, step)
    average.on_train_end(trainer, module)
    assert module.weight.item() == 3.0


def test_what_is_frozen_later_is_validated_by_its_average_too():
    trainer, module = _Trainer(), torch.nn.Linear(1, 1, bias=False)
    average = AverageWeights(decay=0.5)
    torch.nn.init.constant_(module.weight, 4.0)
    for step in (1, 2):
        trainer.global_step = step
        average.on_train_batch_end(trainer, module, None, None, step)
        torch.nn.init.constant_(module.weight, 2.0)
    module.requires_grad_(False)
    average.on_validation_epoch_start(trainer, module)
    assert module.weight.item() == 3.0
    average.on_validation_end(trainer, module)
    assert module.weight.item() == 2.0


def test_one_that_was_in_a_run_before_begins_anew_with_the_next():
    trainer, module, average = _Trainer(), torch.nn.Linear(1, 1, bias=False), AverageWeights(decay=None)
    for _ in range(2):
        average.setup(trainer, module, "fit")
        trainer.global_step = 1
        torch.nn.init.constant_(module.weight, 2.0)
        average.on_train_batch_end(trainer, module, None, None, 0)
        torch.nn.init.constant_(module.weight, 5.0)
        average.on_train_end(trainer, module)
        assert module.weight.item() == 2.0


class _Trainer:
    global_step = 0
    state = SimpleNamespace(fn=TrainerFn.FITTING)
