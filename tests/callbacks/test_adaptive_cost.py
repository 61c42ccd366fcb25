"""Costs follow what is measured: alike on all ranks, from a named step on, packing only, and the same again."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from flowtrain_lightning import FlowCheckpointIO
from flowtrain_lightning.callbacks import AdaptCosts
from flowtrain_lightning.data import PackedBatch, PackingConfig, StepBatch
from flowtrain_lightning.data.steps.step_packing import CostChange
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of, trainer_for
from tests.forks import Job, run_jobs
from tests.tiny import TinyVLM, tiny_data, write_records

SLOWER_FROM = 8


class DearAttention(TinyVLM):
    """Takes four microseconds for each pair of tokens of a sequence, later twice that."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        pairs = float((torch.diff(batch.cu_seqlens).double() ** 2).sum())
        time.sleep(pairs * (4e-6 if self.trainer.global_step < SLOWER_FROM else 8e-6))
        return super().backbone_step(batch, features, stage)


class Notes(L.Callback):
    """Keeps every step's plan, and saves a checkpoint after one of them."""

    def __init__(self, save_at: int) -> None:
        self.save_at = save_at
        self.steps: list[list[Any]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        plan = batch.plan
        microbatches = [[members.tolist() for members in of_rank] for of_rank in plan.microbatches]
        media = [[members.tolist() for members in of_rank] for of_rank in plan.batches["encoder"]]
        self.steps.append([batch.epoch, batch.step, plan.samples.tolist(), microbatches, media])
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    adapts: bool = True,
    replay: str | None = None,
    resume: str | None = None,
    freeze_encoder: bool = False,
    cost: dict[str, float] | None = None,
    **settings: Any,
) -> None:
    """Trains; writes the plans of all steps and the changes of costs."""
    settings["packing"] = PackingConfig(cost=cost and CostModel(**cost))
    notes, adapting = Notes(-1 if resume else 20), AdaptCosts(replay)
    trainer = trainer_for(
        layout,
        max_epochs=2,
        logger=CSVLogger(folder, "log", "0"),
        callbacks=[*([adapting] if adapts else []), notes],
        log_every_n_steps=1,
        precision="64-true",
        default_root_dir=folder,
        plugins=[FlowCheckpointIO()] if layout == "auto" else None,
    )
    trainer.fit(
        DearAttention(freeze_encoder=freeze_encoder), datamodule=tiny_data(Path(data), **settings), ckpt_path=resume
    )
    changes = [change.state_dict() for change in adapting.changes]
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps({"steps": notes.steps, "changes": changes}))
    disconnect_groups()


def train_twice(folder: Path, *, data: str) -> None:
    """Two runs, each with a Trainer of its own, that share the callback; writes the changes of each run."""
    adapting, changes = AdaptCosts(), []
    for number in range(2):
        trainer = trainer_for(
            "colocated 1",
            max_epochs=1,
            logger=False,
            callbacks=[adapting],
            precision="64-true",
            default_root_dir=folder / str(number),
        )
        trainer.fit(DearAttention(), datamodule=tiny_data(Path(data)))
        changes.append([change.state_dict() for change in adapting.changes])
    (folder / "rank0.json").write_text(json.dumps(changes))
    disconnect_groups()


STEPS_OF_AN_EPOCH = 16
Run = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapting")
    write_records(folder / "data", 8 * STEPS_OF_AN_EPOCH)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """What each rank noted in a run; each run is made once."""
    made: dict[str, Path] = {}

    def make(layout: str, **arguments: Any) -> tuple[Path, Run]:
        name = f"{layout} {sorted(arguments)}".replace("/", " ")
        if name not in made:
            given = {"data": str(folder / "data"), "layout": layout, **arguments}
            job = Job(name, f"{__name__}:train", ranks_of(layout), given)
            made[name] = run_jobs(folder, [job])[name].check().folder
        notes = [json.loads((made[name] / f"rank{rank}.json").read_text()) for rank in range(ranks_of(layout))]
        return made[name], notes

    return make


def place(change: dict[str, Any]) -> tuple[int, int]:
    return change["epoch"], change["step"]


FROZEN = ("1+2", {"freeze_encoder": True})
WORKERS = pytest.param("colocated 2", {"num_workers": 1}, marks=pytest.mark.full)


@pytest.mark.parametrize(("layout", "settings"), [("1+2", {}), pytest.param(*FROZEN, marks=pytest.mark.full), WORKERS])
def test_all_ranks_change_costs_alike_and_plan_alike(run, layout, settings):
    _, notes = run(layout, **settings)
    assert len(notes[0]["changes"]) > 1
    assert all(rank == notes[0] for rank in notes)
    changes = notes[0]["changes"]  # of times that a busy machine may blur, in some
    assert any(change["cost"]["quadratic"] > 1e-7 for change in changes)
    assert any(sum(change["media_costs"]["encoder"].values()) > 0 for change in changes)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "settings"), [FROZEN, WORKERS])
def test_steps_before_the_first_change_are_packed_alike_and_samples_never_change(run, layout, settings):
    (_, notes), (_, plain) = run(layout, **settings), run(layout, adapts=False, **settings)
    first = place(notes[0]["changes"][0])
    pairs = list(zip(notes[0]["steps"], plain[0]["steps"], strict=True))
    assert all(adapted[2] == other[2] for adapted, other in pairs)
    assert all(adapted == other for adapted, other in pairs if (adapted[0], adapted[1]) < first)
    assert any(adapted != other for adapted, other in pairs)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "settings"), [FROZEN, WORKERS])
def test_a_run_is_repeated_from_the_file_of_its_changes(run, layout, settings):
    folder, notes = run(layout, **settings)
    (file,) = folder.rglob("cost_changes.json")
    _, repeated = run(layout, replay=str(file), **settings)
    assert repeated[0]["steps"] == notes[0]["steps"]


GIVEN = {"linear": 1e-4, "quadratic": 0.0, "constant": 0.0}


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"cost": GIVEN}, marks=pytest.mark.full)],
    ids=["costs left open", "costs given"],
)
def test_a_resumed_run_packs_by_what_was_found_before(run, settings):
    folder, notes = run("1+2", **settings)
    _, resumed = run("1+2", resume=str(folder / "saved.ckpt"), **settings)
    known = [change for change in notes[0]["changes"] if change in resumed[0]["changes"]]
    assert [place(change) for change in known][-1] > (0, 20)
    begun = next(change for change in resumed[0]["changes"] if change not in known)
    expected = [step for step in notes[0]["steps"][20:] if (step[0], step[1]) < place(begun)]
    assert len(expected) > 4
    assert resumed[0]["steps"][: len(expected)] == expected


@pytest.mark.full
@pytest.mark.parametrize("layout", ["auto", "colocated 1"])
def test_a_run_goes_on_with_the_costs_that_were_found_on_other_layouts(run, layout):
    saved, notes = run("1+2", freeze_encoder=True)
    _, resumed = run(layout, resume=str(saved / "saved.ckpt"))
    assert [step[2] for step in resumed[0]["steps"]] == [step[2] for step in notes[0]["steps"][20:]]
    known = [change for change in resumed[0]["changes"] if change in notes[0]["changes"]]
    assert len(known) > 1
    assert layout != "auto" or known == resumed[0]["changes"]


@pytest.mark.full
def test_with_another_trainer_the_callback_begins_anew(folder):
    job = Job("twice", f"{__name__}:train_twice", 1, {"data": str(folder / "data")})
    first, second = json.loads((run_jobs(folder, [job])["twice"].check().folder / "rank0.json").read_text())
    assert [place(change) for change in second] == [place(change) for change in first]
    assert second[0] not in first


def test_the_error_of_the_predictions_is_logged(run):
    folder, _ = run("1+2")
    (file,) = folder.rglob("metrics.csv")
    rows = list(csv.DictReader(file.open()))
    for role in ("backbone", "encoder"):
        errors = [float(row[f"{role}_cost_error"]) for row in rows if row.get(f"{role}_cost_error")]
        assert len(errors) == 2 * STEPS_OF_AN_EPOCH // 5
    assert min(errors[1:]) < 0.9


def test_other_loaders_are_refused(tmp_path):
    file = tmp_path / "cost_changes.json"
    file.write_text(json.dumps([CostChange(0, 12, CostModel(1.0, 0.0, 0.0)).state_dict()]))
    with pytest.raises(TypeError, match="the training loader is a list"):
        AdaptCosts(replay=file).on_train_epoch_start(SimpleNamespace(train_dataloader=[]), None)
