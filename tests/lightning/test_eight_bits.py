"""Optimizers whose moments are kept in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.trainer.optimizer_refusals import refuse_optimizers
from tests.checkpoint.conftest import seen_by
from tests.checkpoint.test_resume import same
from tests.exactness.data import STEPS, steps_data, write_steps
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Recorder, weights_of
from tests.forks import Job, run_jobs
from tests.tiny import TinyVLM

SAVED_AT = 3


class SavingRecorder(Recorder):
    """Also saves ``saved.ckpt`` on the way."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.folder / "saved.ckpt")


class EightBitVLM(TinyVLM):
    """Its larger matrices have AdamW's moments in 8 bits."""

    def configure_optimizers(self) -> Any:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=1e-2, min_8bit_size=512)


def train(
    folder: Path, *, data: str, layout: str, roles: dict[str, Any] | None = None, resume: str | None = None
) -> None:
    """Trains; every rank writes down losses and weights, and how many moments are in 8 bits."""
    recorder = SavingRecorder(folder)
    strategy = {"roles": roles} if roles else None
    trainer = trainer_for(
        layout,
        strategy=strategy,
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[recorder],
        default_root_dir=folder,
    )
    module = EightBitVLM()
    trainer.fit(module, datamodule=steps_data(Path(data)), ckpt_path=resume)
    states = trainer.optimizers[0].state.values()
    quantised = sum(str(entries["state1"].dtype) == "torch.uint8" for entries in states)
    seen = {"losses": recorder.losses, "weights": weights_of(module), "quantised": quantised}
    torch.save(seen, folder / f"rank{trainer.global_rank}.pt")
    disconnect_groups()


def test_with_moments_in_8_bits_a_run_trains_and_goes_on_to_the_bit(tmp_path):
    pytest.importorskip("bitsandbytes")
    write_steps(tmp_path / "data")
    data, train = str(tmp_path / "data"), f"{__name__}:train"
    jobs = [
        Job("auto", train, 1, {"data": data, "layout": "auto"}),
        Job("1+1", train, 2, {"data": data, "layout": "1+1"}),
    ]
    done = run_jobs(tmp_path, jobs)
    saved = str(done["1+1"].check().folder / "saved.ckpt")
    (resumed,) = run_jobs(tmp_path, [Job("on", train, 2, {"data": data, "layout": "1+1", "resume": saved})]).values()
    alone = seen_by(done["auto"].check().folder)
    straight, on = ([seen_by(run.check().folder, rank) for rank in range(2)] for run in (done["1+1"], resumed))
    assert all(rank["quantised"] > 0 for rank in straight)
    assert sum(rank["quantised"] for rank in straight) == alone["quantised"]
    assert straight[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3)  # rounding may end in another of 256 steps
    assert alone["losses"][-1] < alone["losses"][0]
    for one, other in zip(straight, on, strict=True):
        assert one["losses"][-len(other["losses"]) :] == other["losses"]
        assert same(one["weights"], other["weights"])


def test_moments_that_checkpoints_cannot_hold_are_refused():
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    with pytest.raises(TypeError, match=r"torchao's AdamW8bit .*Take bitsandbytes\.optim\.AdamW8bit"):
        refuse_optimizers([kind([torch.nn.Parameter(torch.zeros(2))])])
