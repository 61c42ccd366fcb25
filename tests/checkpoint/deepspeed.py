"""What a rank does in the tests of checkpoints of halves that DeepSpeed optimizes: several runs in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flowtrain_lightning.parallel.groups import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Named, weights_of
from tests.forks import write_down
from tests.tiny import TinyVLM, tiny_data

BOTH = {"encoder": {"shard": "deepspeed-2"}, "backbone": {"shard": "deepspeed-1"}}


class Grouped(TinyVLM):
    """Two groups of parameters, each with some of both halves."""

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LateEncoder(Grouped):
    """Half of its encoder is not used, and so never stepped."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.unused = torch.nn.Linear(3, 3)


def train(
    folder: Path, name: str, data: str, roles: dict[str, Any], *, ckpt_path: str | None = None, **more: Any
) -> Named:
    """Trains up to four steps, with a checkpoint after two, and returns the weights."""
    kind = more.pop("kind", Grouped)
    trainer = trainer_for(
        "colocated 2",
        strategy={"roles": roles, **more},
        precision="32-true",
        max_steps=4,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
        default_root_dir=folder / name,
    )
    module = kind()
    trainer.fit(module, tiny_data(Path(data), global_batch_size=6), ckpt_path=ckpt_path)
    return weights_of(module)


def resume(folder: Path, *, data: str) -> None:
    """Goes on from each of two layouts' checkpoints in both, and notes how far the weights are apart."""
    runs = {
        "by deepspeed": train(folder, "deepspeed", data, BOTH),
        "whole copies": train(folder, "copies", data, {}),
    }
    shards = {"backbone": {"shard": "fsdp"}}
    for saved, name, layout in (
        ("deepspeed", "deepspeed", BOTH),
        ("copies", "deepspeed", BOTH),
        ("deepspeed", "shards", shards),
    ):
        path = str(folder / saved / "step=2.ckpt")
        runs[f"{saved} to {name}"] = train(
            folder, f"{saved}-{name}", data, layout, ckpt_path=path, background_saving=saved == name
        )
    write_down(folder, {name: _apart(weights, runs["by deepspeed"]) for name, weights in runs.items()})
    disconnect_groups()


def refuse(folder: Path, *, data: str) -> None:
    """Notes what is said of a weight that is never used, and of its optimizer state in another run."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(folder, "deepspeed", data, BOTH, kind=LateEncoder)
    train(folder, "copies", data, {}, kind=LateEncoder)
    try:
        train(folder, "rest", data, BOTH, kind=LateEncoder, ckpt_path=str(folder / "copies" / "step=2.ckpt"))
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    write_down(folder, {"warnings": [str(each.message) for each in seen], "refusal": refusal})
    disconnect_groups()


def _apart(one: Named, other: Named) -> float:
    assert one.keys() == other.keys()
    return max(
        float((weight - other[name]).norm() / other[name].norm())  # type: ignore[operator, union-attr]
        for name, weight in one.items()
        if "key" not in name
    )
