"""A module that overrides ``training_step``: what it returns means what it means to Lightning, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.lightning.run_context import RunContext, half_lengths
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["auto", "one"])
def context(request: pytest.FixtureRequest, tmp_path: Path, data_folder: Path) -> RunContext:
    """Plain Lightning, and flowtrain on one rank, in this process."""
    return RunContext(request.param, tmp_path, data_folder)


class Skipping(TinyVLM):
    """Skips its second step, as of a loss that is not finite; lacks nothing of Lightning's contract."""

    skips = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.skips and batch_idx == 1 else loss


class Watching(Skipping):
    """Trains on each step; notes the halves' lengths after each."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.lengths: list[dict[str, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.lengths.append(half_lengths(self))


def _fit(context: RunContext, module: TinyVLM, **settings: Any) -> L.Trainer:
    L.seed_everything(7, verbose=False)
    trainer = context.trainer(max_steps=3, limit_val_batches=0, enable_checkpointing=False, **settings)
    trainer.fit(module, context.data())
    return trainer


def test_a_step_that_returns_none_changes_no_weight(context):
    skipping, training = Watching(skips=True), Watching(skips=False)
    for module in (skipping, training):
        _fit(context, module)
    assert skipping.lengths[0] == training.lengths[0] == skipping.lengths[1]
    assert training.lengths[1] != training.lengths[0]
    assert skipping.lengths[2] != skipping.lengths[1]


class Halved(TinyVLM):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.5


class WithPenalty(TinyVLM):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum(weight.square().sum() for weight in self.backbone.parameters())
        return super().training_step(batch, batch_idx) + 0.01 * penalty


class OnItsOwn(TinyVLM):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.backbone.head.weight, torch.zeros_like(self.backbone.head.weight))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Halved, "of which the gradients are"),
        (WithPenalty, "what was added would not be trained"),
        (OnItsOwn, "does not call super"),
    ],
)
def test_a_loss_whose_gradients_nobody_would_make_is_refused(context, kind, said):
    with pytest.raises(ValueError, match=said) as refused:
        _fit(context, kind())
    assert kind.__name__ in str(refused.value)
    assert "Compute all that is to train in `loss`" in str(refused.value)


class Casting(TinyVLM):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": super().training_step(batch, batch_idx).bfloat16()}


def test_the_same_loss_may_come_back_in_another_form(context):
    assert _fit(context, Casting()).global_step == 3


def test_a_scaled_loss_is_refused_where_nobody_scales_its_backward(tmp_path, data_folder):
    scaling = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))  # as on a GPU
    with pytest.raises(ValueError, match="gradients would come out too small"):
        _fit(RunContext("auto", tmp_path, data_folder), TinyVLM(), plugins=[scaling], precision=None)
