"""What the processes of the evaluation's tests run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from torchmetrics.text import CharErrorRate

from flowtrain_lightning.callbacks import EvaluateAnswers
from flowtrain_lightning.metrics import AnswerSimilarity
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.tiny import TinyVLM, tiny_data

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
