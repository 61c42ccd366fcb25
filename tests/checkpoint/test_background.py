"""Saving while training goes on: what is saved is what was there, and a kill leaves a whole checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flowtrain_lightning.checkpoint import read_checkpoint
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.checkpoint.test_checkpoint import value_in
from tests.exactness.data import steps_data, write_steps
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import Deep
from tests.exactness.train import weights_of
from tests.forks import Job, read_down, run_jobs, write_down

SHARDED = {"encoder": {"shard": "fsdp"}, "backbone": {"shard": "fsdp"}}


def fit(folder: Path, *, data: str, layout: str) -> None:
    """Saves after each of three steps, and keeps the last; notes before each step whether there is a whole one."""
    kept = folder / "kept"
    whole: list[bool] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            found = [path for path in kept.glob("*.ckpt") if not path.name.startswith(".")]
            if trainer.global_step > 1:  # the first save has ended when the second began
                whole.append(all("state_dict" in read_checkpoint(path) for path in found) and bool(found))

    trainer = trainer_for(
        layout,
        strategy={"roles": SHARDED, "background_saving": True},
        max_steps=3,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[Look(), ModelCheckpoint(kept, filename="{step}", every_n_train_steps=1, save_top_k=1)],
        default_root_dir=folder,
    )
    module = Deep(lr=1e-3)
    trainer.fit(module, steps_data(Path(data)))
    weights = weights_of(module)
    torch.save(weights, folder / f"weights{trainer.global_rank}.pt")
    trainer.strategy.barrier()
    write_down(folder, {"left": sorted(path.name for path in kept.iterdir()), "whole": whole})
    disconnect_groups()


SAVE = "tests.checkpoint.saving:save"
DEATHS = [
    ("in the middle of its half", 1),
    ("before the random states", 0),
    ("in the middle of the index", 0),
    ("before the name", 0),
    ("after the exchange", 0),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """For each moment: the folder in which ``last.ckpt`` was to be replaced, as the kill left it."""
    root = tmp_path_factory.mktemp("killed")
    folders = {moment: root / moment for moment, _ in DEATHS}
    paths = [str(folder / "last.ckpt") for folder in folders.values()]
    run_jobs(root / "jobs", [Job("first", SAVE, 2, {"paths": paths, "value": 1, "background": True})])["first"].check()
    jobs = [
        Job(moment, SAVE, 2, {"paths": [path], "value": 2, "moment": moment, "victim": victim, "background": True})
        for (moment, victim), path in zip(DEATHS, paths, strict=True)
    ]
    done = run_jobs(root / "jobs", jobs)
    return {moment: (done[moment], folder) for moment, folder in folders.items()}


@pytest.mark.parametrize(("moment", "victim"), DEATHS)
def test_a_kill_of_a_saving_thread_leaves_the_former_or_the_new_checkpoint_whole(killed, moment, victim):
    done, folder = killed[moment]
    assert done.codes[victim] == -9, done.log
    assert value_in(read_checkpoint(folder / "last.ckpt")) == (2 if moment == "after the exchange" else 1)


def test_a_full_disk_is_told_on_every_rank_and_keeps_the_checkpoint_before(tmp_path):
    target = "tests.checkpoint.saving:save_in_the_background_where_no_room_is_left"
    done = run_jobs(tmp_path, [Job("full", target, 2, {"most_bytes": 100})])["full"].check()
    for found in read_down(done.folder):
        assert "last.ckpt was not saved; rank 1 could not write its part" in found["told"]
        assert found["left"] == ["last.ckpt"]
        assert found["kept"] == 1


def test_a_run_leaves_the_checkpoints_that_it_leaves_without_threads(tmp_path):
    write_steps(tmp_path / "data")
    arguments = {"data": str(tmp_path / "data"), "layout": "colocated 2"}
    done = run_jobs(tmp_path, [Job("fit", f"{__name__}:fit", 2, arguments)])["fit"]
    for found in read_down(done.check().folder):
        assert found["left"] == ["step=3.ckpt"]
        assert found["whole"] == [True] * len(found["whole"])
        assert len(found["whole"]) >= 1
    saved = read_checkpoint(done.folder / "kept" / "step=3.ckpt")
    assert saved["global_step"] == 3
    weights = torch.load(done.folder / "weights0.pt", weights_only=True)
    assert [name for name, weight in weights.items() if not torch.equal(saved["state_dict"][name], weight)] == []
