"""Biases that keep experts equally full are in a checkpoint, and go on in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.checkpoint import FlowCheckpointIO, read_checkpoint
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.compare import error, read_run
from tests.exactness.data import STEPS, steps_data, write_steps
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.mixture import Balanced
from tests.exactness.train import Recorder
from tests.forks import Job, run_jobs
from tests.models.training import SaveAfter

MIDDLE = STEPS // 2
DIVIDED = "1+2", {"backbone": {"expert": 2, "shard": "fsdp", "recompute": "full"}}
COLOCATED = "colocated 2", {"encoder": {"expert": 2}}
PLAIN: tuple[str, dict[str, Any]] = ("auto", {})


def train(folder: Path, *, data: str, layout: str, roles: dict[str, Any], resumed: str | None = None) -> None:
    """Trains all steps, or those after the middle; checkpoints are of the middle and of the end."""
    recorder = Recorder()
    callbacks = [recorder, SaveAfter(MIDDLE, folder / "middle.ckpt")]
    trainer = trainer_for(
        layout,
        strategy={"roles": roles},
        precision="64-true",
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=callbacks,
        plugins=[FlowCheckpointIO()] if layout == "auto" and resumed else None,
        default_root_dir=folder,
    )
    trainer.fit(Balanced(), datamodule=steps_data(Path(data)), ckpt_path=resumed)
    trainer.save_checkpoint(folder / "last.ckpt")
    recorder.save(folder)
    disconnect_groups()


def biases(path: Path) -> dict[str, list[int]]:
    saved = read_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=False)
    state = saved["state_dict"]
    return {name: state[name].tolist() for name in state if name.endswith(".raised")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [(DIVIDED, PLAIN), (PLAIN, DIVIDED), (COLOCATED, DIVIDED)],
    ids=["to plain", "from plain", "across"],
)
def test_biases_of_experts_go_on_in_another_layout(tmp_path, first, then):
    write_steps(tmp_path / "data")

    def run(name: str, layout: str, roles: dict[str, Any], **more: Any) -> Path:
        arguments = {"data": str(tmp_path / "data"), "layout": layout, "roles": roles, **more}
        job = Job(name, f"{__name__}:train", ranks_of(layout), arguments)
        return run_jobs(tmp_path, [job])[name].check().folder

    unbroken = run("first", *first)
    found = run("then", *then, resumed=str(unbroken / "middle.ckpt"))
    middle, last = biases(unbroken / "middle.ckpt"), biases(unbroken / "last.ckpt")
    assert len(middle) == 4
    assert all(any(values) for values in middle.values())
    assert biases(found / "last.ckpt") == last != middle
    assert error(read_run(found).weights[-1], read_run(unbroken).weights[-1]) <= 1e-9
