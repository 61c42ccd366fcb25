"""What a rank does in the tests of Lightning's stages on sharded roles; it writes down what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import Divided
from tests.exactness.train import weights_of
from tests.forks import write_down
from tests.tiny import tiny_data

SHARDED = {"encoder": {"shard": "fsdp"}, "backbone": {"shard": "fsdp"}}
TENSOR = {"backbone": {"tensor": 2}}


def train(
    folder: Path, *, data: str, layout: str, roles: dict[str, Any], steps: int, ckpt_path: str | None = None
) -> None:
    """Trains up to so many steps, and keeps a checkpoint and the weights."""
    trainer = trainer_for(
        layout,
        strategy={"roles": roles},
        precision="64-true",  # in which key biases, whose gradient is rounding alone, stay what they are
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, filename="saved", every_n_train_steps=steps)],
        default_root_dir=folder,
    )
    module = Divided(lr=1e-3)
    trainer.fit(module, tiny_data(Path(data), global_batch_size=6), ckpt_path=ckpt_path)
    weights = weights_of(module)
    torch.save(weights, folder / f"weights{trainer.global_rank}.pt")
    disconnect_groups()


def fail_in_a_step(folder: Path, *, data: str, layout: str, roles: dict[str, Any]) -> None:
    """Notes what ``fit`` raises where the user's loss does."""
    trainer = trainer_for(layout, strategy={"roles": roles}, max_steps=1, default_root_dir=folder)
    try:
        trainer.fit(Failing(), tiny_data(Path(data), global_batch_size=6))
    except Exception as error:
        write_down(folder, {"raised": type(error).__name__, "text": str(error)})


class Failing(Divided):
    """Raises while the graph of a step is alive."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        raise LookupError("the user's own")


class Watched(Divided):
    """Notes of which type the gradients are that a hook sees, and has metrics of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tokens = SumMetric(sync_on_compute=False)
        self.mean = MeanMetric(sync_on_compute=False)

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss, tokens = super().loss(outputs, batch)
        if self.trainer.training:
            self.tokens.update(tokens)
            self.mean.update(loss.detach() / max(tokens, 1), tokens)
        return loss, tokens

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self.seen = sorted({type(weight.grad).__name__ for weight in weights if weight.grad is not None})


def all_stages(folder: Path, *, data: str, layout: str, roles: dict[str, Any]) -> None:
    """Fits with validation, validates, tests and predicts, and fits on, with one Trainer."""
    trainer = trainer_for(layout, strategy={"roles": roles}, max_epochs=1, default_root_dir=folder)
    module, records = Watched(lr=1e-3), tiny_data(Path(data), global_batch_size=6)
    trainer.fit(module, records)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    own = [float(module.tokens.compute()), float(module.mean.compute())]
    validated = trainer.validate(module, records, verbose=False)
    predicted = trainer.predict(module, records)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, records)
    refitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    stages = {"fit": fitted, "validate": validated, "predicted": len(predicted or []), "refit": refitted}
    write_down(folder, {**stages, "gradients": module.seen, "own metrics": own})
    disconnect_groups()
