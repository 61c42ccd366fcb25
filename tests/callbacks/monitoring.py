"""What the processes of the monitor's tests run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from flowtrain_lightning.callbacks import FlowMonitor
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.tiny import TinyVLM, tiny_data


def train(folder: Path, *, data: str, layout: str, freeze_encoder: bool = False, every_n_steps: int = 2) -> None:
    """Trains an epoch under the monitor; rank 0's logger writes ``log/metrics.csv``."""
    trainer = trainer_for(
        layout,
        max_epochs=1,
        limit_val_batches=0,
        log_every_n_steps=every_n_steps,
        logger=CSVLogger(folder, "log", ""),
        callbacks=[FlowMonitor(every_n_steps, peak_flops=1e12)],
        default_root_dir=folder,
    )
    trainer.fit(TinyVLM(freeze_encoder=freeze_encoder), datamodule=tiny_data(Path(data)))
    disconnect_groups()
