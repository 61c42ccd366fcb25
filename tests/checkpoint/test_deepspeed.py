"""Checkpoints of halves that DeepSpeed optimizes: by parameter name, to and from other layouts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.compare import error
from tests.exactness.layouts import trainer_for
from tests.exactness.test_layouts import without_key_biases
from tests.exactness.train import Named, weights_of
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import TinyVLM, tiny_data, write_records

ON_HOST = {"offload": "optimizer"}
BOTH = {"encoder": {"shard": "deepspeed-2", **ON_HOST}, "backbone": {"shard": "deepspeed-1"}}
SHARDED = {"encoder": {"shard": "deepspeed-3"}, "backbone": {"shard": "deepspeed-3", **ON_HOST}}


class Grouped(TinyVLM):
    """Two groups of parameters, each with some of both halves."""

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class UnusedLayer(Grouped):
    """Its encoder has a layer that is not used, and so never stepped."""

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


def resume_shards(folder: Path, *, data: str) -> None:
    """As `resume`, with the weights in shards of DeepSpeed."""
    resume(folder, data=data, roles=SHARDED)


def resume(folder: Path, *, data: str, roles: dict[str, Any] = BOTH) -> None:
    """Goes on from each of two layouts' checkpoints in both, and notes how far the weights are apart."""
    runs = {
        "by deepspeed": train(folder, "deepspeed", data, roles),
        "whole copies": train(folder, "copies", data, {}),
    }
    shards = {"backbone": {"shard": "fsdp"}}
    for saved, name, layout in (
        ("deepspeed", "deepspeed", roles),
        ("copies", "deepspeed", roles),
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
        train(folder, "deepspeed", data, BOTH, kind=UnusedLayer)
    train(folder, "copies", data, {}, kind=UnusedLayer)
    try:
        train(folder, "rest", data, BOTH, kind=UnusedLayer, ckpt_path=str(folder / "copies" / "step=2.ckpt"))
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    write_down(folder, {"warnings": [str(each.message) for each in seen], "refusal": refusal})
    disconnect_groups()


def all_stages(folder: Path, *, data: str) -> None:
    """Fits with validation, validates, predicts and fits on, in mixed precision, by DeepSpeed and on whole copies."""
    found = {}
    for name, roles in (("deepspeed", BOTH), ("shards", SHARDED), ("copies", {})):
        trainer = trainer_for(
            "colocated 2", strategy={"roles": roles}, precision="bf16-mixed", max_epochs=1, default_root_dir=folder
        )
        module, records = Grouped(), tiny_data(Path(data), global_batch_size=6)
        trainer.fit(module, records)
        metrics = [trainer.callback_metrics.copy(), trainer.validate(module, records, verbose=False)[0]]
        predicted = trainer.predict(module, records)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, records)
        metrics.append(trainer.callback_metrics)
        numbers = [float(value) for of_stage in metrics for _, value in sorted(of_stage.items())]
        found[name] = [*numbers, len(predicted or [])]
    write_down(folder, found)
    disconnect_groups()


def _apart(one: Named, other: Named) -> float:
    return error(without_key_biases(one), without_key_biases(other))


pytest.importorskip("deepspeed")


def noted(folder: Path, target: str) -> list[dict[str, Any]]:
    for name, count in (("train.jsonl", 24), ("val.jsonl", 8), ("predict.jsonl", 5)):
        write_records(folder / "data", count, name)
    job = Job("job", f"{__name__}:{target}", 2, {"data": str(folder / "data")}, imports="deepspeed")
    return read_down(run_jobs(folder, [job])["job"].check().folder)


@pytest.mark.parametrize("target", [pytest.param("resume", marks=pytest.mark.full), "resume_shards"])
def test_a_run_goes_on_bit_for_bit_and_to_and_from_other_layouts(tmp_path, target):
    for apart in noted(tmp_path, target):
        assert apart.pop("deepspeed to deepspeed") == 0.0
        assert apart == {name: pytest.approx(0.0, abs=1e-5) for name in apart}


def test_weights_that_no_step_used_are_told_of_and_refused_where_states_differ(tmp_path):
    for rank in noted(tmp_path, "refuse"):
        assert any("2 of 18 weights took part in no sample" in each for each in rank["warnings"]), rank["warnings"]
        assert "encoder.unused" in rank["refusal"]
        assert "was never stepped" in rank["refusal"]


def test_stages_in_mixed_precision_give_what_they_give_on_whole_copies(tmp_path):
    for found in noted(tmp_path, "all_stages"):
        assert found["deepspeed"] == pytest.approx(found["copies"], rel=0.01)
        assert found["shards"] == pytest.approx(found["copies"], rel=0.01)
