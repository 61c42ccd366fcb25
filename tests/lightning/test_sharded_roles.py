"""Roles whose ranks share weights, through Lightning's stages and checkpoints: as whole copies of the same module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from flowtrain_lightning.data import PackedBatch, PackedMedia, StepBatch
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.modules import Divided
from tests.exactness.train import weights_of
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import tiny_data, write_records

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


class Counting(Divided):
    """Counts samples and patches in metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.patches = SumMetric(sync_on_compute=False), SumMetric(sync_on_compute=False)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        self.patches.update(media.patch_count)
        return super().encode(media)

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        self.samples.update(len(batch.cu_seqlens) - 1)
        return super().loss(outputs, batch)

    def on_train_batch_end(self, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        counted = [float(metric.compute()) for metric in (self.samples, self.patches)]
        true = [len(batch.plan.samples), int(batch.plan.sizes.media_patches[batch.plan.encoded].sum())]
        self.told = [*getattr(self, "told", []), {"counted": counted, "true": true}]


def count(folder: Path, *, data: str, layout: str, roles: dict[str, Any]) -> None:
    """Steps of one sample, for which most ranks have padding, and whose pictures are encoded twice."""
    strategy = {"roles": roles, "encoder_activations": 0}
    trainer = trainer_for(layout, strategy=strategy, max_steps=6, limit_val_batches=0, default_root_dir=folder)
    module = Counting()
    trainer.fit(module, tiny_data(Path(data), global_batch_size=1))
    write_down(folder, {"steps": module.told})
    disconnect_groups()


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


LAYOUTS = [pytest.param("2+2", marks=pytest.mark.full), "colocated 2"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    for name, count in (("train.jsonl", 24), ("val.jsonl", 8), ("predict.jsonl", 1)):  # one rank has nothing to predict
        write_records(tmp_path / "data", count, name)
    return str(tmp_path / "data")


def run(folder: Path, target: str, name: str, layout: str, **arguments: Any) -> Path:
    job = Job(
        name,
        f"{__name__}:{target}",
        ranks_of(layout),
        {"layout": layout, **arguments},
        deadline=150,
    )
    return run_jobs(folder, [job])[name].check().folder


def tokens_and_mean(ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """What the metrics of all ranks that computed a loss say together."""
    own = [rank["own metrics"] for rank in ranks if rank["own metrics"][0]]
    tokens = sum(count for count, _ in own)
    return tokens, sum(count * mean for count, mean in own) / tokens


def weights(folder: Path) -> dict[str, torch.Tensor]:
    ranks = [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights*.pt"))]
    return {name: weight for rank in ranks for name, weight in rank.items()}


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("colocated 2", SHARDED),
        pytest.param("2+2", SHARDED, marks=pytest.mark.full),
        pytest.param("1+2", TENSOR, marks=pytest.mark.full),
        pytest.param("1+2", {"backbone": {"context": 2}}, marks=pytest.mark.full),
    ],
)
def test_stages_give_what_they_give_on_whole_copies(tmp_path, data, layout, roles):
    found = read_down(run(tmp_path, "all_stages", "sharded", layout, data=data, roles=roles))
    expected = read_down(run(tmp_path, "all_stages", "whole", layout, data=data, roles={}))
    for one, other in zip(found, expected, strict=True):
        assert one["predicted"] == other["predicted"]
        assert one["gradients"] == ["DTensor"] or roles != SHARDED
        assert other["gradients"] == ["Tensor"]
        assert one["validate"][0] == pytest.approx(other["validate"][0], rel=1e-4)
        for stage in ("fit", "refit"):
            assert one[stage] == pytest.approx(other[stage], rel=1e-4)
    (tokens, mean), (all_tokens, true_mean) = (tokens_and_mean(ranks) for ranks in (found, expected))
    assert tokens == all_tokens * (2 if roles == TENSOR else 1), "tensor ranks count the same tokens"
    assert mean == pytest.approx(true_mean, rel=1e-4)


@pytest.mark.parametrize("roles", [SHARDED, pytest.param({}, marks=pytest.mark.full)])
def test_padding_and_what_is_computed_again_count_in_no_metric(tmp_path, data, roles):
    folder = run(tmp_path, "count", "count", "colocated 2", data=data, roles=roles)
    ranks = [rank["steps"] for rank in read_down(folder)]
    true = [0, 0]
    for of_ranks in zip(*ranks, strict=True):
        true = [sum(counts) for counts in zip(true, of_ranks[0]["true"], strict=True)]
        assert [sum(counts) for counts in zip(*(step["counted"] for step in of_ranks), strict=True)] == true
    assert true[1] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_its_checkpoint_on_the_same_shards_bit_for_bit(tmp_path, data, layout):
    settings = {"data": data, "roles": SHARDED}
    whole = run(tmp_path, "train", "whole", layout, steps=4, **settings)
    half = run(tmp_path, "train", "half", layout, steps=2, **settings)
    rest = run(tmp_path, "train", "rest", layout, steps=4, ckpt_path=str(half / "saved.ckpt"), **settings)
    expected, found = weights(whole), weights(rest)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not expected[name].equal(found[name])] == []


@pytest.mark.full  # `tests/checkpoint/test_sharded.py` shows it of every two layouts, to the bit
@pytest.mark.parametrize(
    ("saved_on", "goes_on"),
    [
        (("2+2", SHARDED), ("1+1", {})),
        (("1+2", {}), ("2+2", SHARDED)),
        (("colocated 2", SHARDED), ("1+4", SHARDED)),
        (("1+2", TENSOR), ("1+1", {})),
        (("1+1", {}), ("1+2", TENSOR)),
    ],
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path, data, saved_on, goes_on):
    (layout, roles), (other, other_roles) = saved_on, goes_on
    half = run(tmp_path, "train", "half", layout, steps=2, data=data, roles=roles)
    saved = str(half / "saved.ckpt")
    rest = run(tmp_path, "train", "rest", other, steps=4, data=data, roles=other_roles, ckpt_path=saved)
    expected = weights(run(tmp_path, "train", "whole", "1+1", steps=4, data=data, roles={}))
    found = weights(rest)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("colocated 2", {"backbone": {"tensor": 2}}),
        pytest.param("colocated 2", SHARDED, marks=pytest.mark.full),
        pytest.param("colocated 2", {"backbone": {"context": 2}}, marks=pytest.mark.full),
    ],
)
def test_what_fit_raises_is_the_users_own_exception(tmp_path, data, layout, roles):
    """And nothing that follows from it, such as that a weight in shards cannot be moved while a graph holds it."""
    given = {"layout": layout, "data": data, "roles": roles}
    job = Job("fails", f"{__name__}:fail_in_a_step", ranks_of(layout), given, deadline=150)
    found = read_down(run_jobs(tmp_path, [job])["fails"].folder)
    assert [(each["raised"], each["text"]) for each in found] == [("LookupError", "the user's own")] * 2
