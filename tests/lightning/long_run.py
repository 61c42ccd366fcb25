"""Trains until somebody ends it, or fails where it is told to: ``encode``, ``loss``, ``names``, ``log after a step``.

At ``sigterm`` the encoder rank is asked to end.

Also a script, ``long_run.py FOLDER DATA``. After three steps each rank writes ``pid-RANK``.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import SpikeDetection
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.lightning.run_context import RunContext
from tests.tiny import TinyVLM


class Failing(TinyVLM):
    """Raises in one of the user's methods, in the third step."""

    def __init__(self, place: str = "") -> None:
        super().__init__()
        self.place = place

    def encode(self, media: Any) -> Any:
        self._fail("encode")
        return super().encode(media)

    def loss(self, outputs: Any, batch: Any) -> Any:
        self._fail("loss")
        loss, tokens = super().loss(outputs, batch)
        return (loss * 1e6 if self.place == "spike" and self.trainer.global_step == 3 else loss), tokens

    def on_train_batch_end(self, *_: Any) -> None:
        if self.place == "names" and self.trainer.global_step == 3:
            self.log(f"gradients_on_rank_{self.trainer.global_rank}", 1.0)
        if self.place == "sigterm" and self.trainer.global_step == 3 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self._log_alone("step")

    def on_train_epoch_end(self) -> None:
        self._log_alone("epoch")

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self._log_alone("validation")

    def _log_alone(self, after: str) -> None:
        if self.place.startswith(f"log after a {after}") and self.trainer.is_global_zero:
            self.log("note", 1.0)

    def _fail(self, place: str) -> None:
        if place == self.place and self.trainer.global_step == 2:
            raise ZeroDivisionError(f"a mistake in the user's {place}")


class Report(L.Callback):
    """Says that training is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            unfinished = self.folder / f".pid-{trainer.global_rank}"
            unfinished.write_text(str(os.getpid()))
            unfinished.rename(self.folder / f"pid-{trainer.global_rank}")


def train(folder: Path, data_folder: str, place: str = "") -> None:
    """Trains on one encoder rank and one backbone rank, or on two colocated ones."""
    L.seed_everything(7, verbose=False)
    context = RunContext("colocated" if "colocated" in place else "1+1", folder, Path(data_folder))
    spikes = SpikeDetection(warmup=1, rtol=2.0, exclude_batches_path=str(folder / "skip.json"))
    bounds = {"max_epochs": 100_000, "limit_val_batches": int("validation" in place), "enable_checkpointing": False}
    trainer = context.trainer(callbacks=[Report(folder), spikes], **bounds)
    with suppress(SIGTERMException) if place == "sigterm" else nullcontext():  # by which a script ends well
        trainer.fit(Failing(place), context.data())


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
