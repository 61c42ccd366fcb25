"""How halves compute: every precision, activation checkpointing, and compiled halves."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.lightning.run_context import Recorder, RunContext, half_lengths, numbers
from tests.tiny import Backbone, TinyVLM

pytestmark = pytest.mark.timeout(600)

PRECISIONS = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
}
"""What a Trainer may be given, and in what the weights are kept."""


class Sharing(Backbone):
    """Computes its activations a second time in the backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


class Checkpointed(TinyVLM):
    """Both halves with activation checkpointing; dropout must be drawn alike both times."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def configure_backbone(self) -> None:
        self.backbone = Sharing()

    def encode(self, media: Any) -> Any:
        return checkpoint(self.encoder, media, use_reentrant=False)


class Compiled(TinyVLM):
    """One half compiled in place, the other one wrapped."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.compile(backend="aot_eager", dynamic=True)

    def configure_backbone(self) -> None:
        self.backbone = torch.compile(Backbone(), backend="aot_eager", dynamic=True)


class Untargeted(TinyVLM):
    """The second step has no target tokens."""

    def loss(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return (loss * 0.0, 0) if self.training and self.trainer.global_step == 1 else (loss, tokens)


MODULES = {
    "plain": TinyVLM,
    "dropout": lambda: TinyVLM(dropout=0.3),
    "checkpointed": Checkpointed,
    "compiled": Compiled,
    "untargeted": Untargeted,
}
COMPARED = ("plain", "untargeted")
"""Those that plain Lightning trains as well."""


def every_precision(context: RunContext) -> None:
    for precision in PRECISIONS:
        L.seed_everything(7, verbose=False)
        module, recorder = TinyVLM(), Recorder()
        trainer = context.trainer(max_epochs=3, precision=precision, callbacks=[recorder], enable_checkpointing=False)
        trainer.fit(module, context.data())
        present = [p for p in module.parameters() if not p.is_meta]
        context.notes[precision] = {
            "losses": [event[2] for event in recorder.events if event[0] == "train"],
            "metrics": numbers(trainer.callback_metrics),
            "dtypes": sorted({str(p.dtype) for p in present}),
            "predictions": len(trainer.predict(module, context.data())),
        }


def every_module(context: RunContext) -> None:
    for name in COMPARED if context.layout == "auto" else MODULES:
        L.seed_everything(7, verbose=False)
        module = MODULES[name]()
        trainer = context.trainer(max_steps=3, limit_val_batches=1, enable_checkpointing=False)
        trainer.fit(module, context.data())
        context.notes[name] = {"lengths": half_lengths(module), "metrics": numbers(trainer.callback_metrics)}


LAYOUTS_OF_RUNS = {every_precision: ("auto", "1+1"), every_module: ("auto", "1+1")}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_trains_as_under_plain_lightning(layout_runs, precision):
    plain = layout_runs.notes(every_precision, "auto")[0]
    close = {"64-true": 1e-9, "32-true": 1e-4}.get(precision, 0.03)
    for rank in layout_runs.notes(every_precision, "1+1"):
        own = rank[precision]
        assert own["losses"] == pytest.approx(plain[precision]["losses"], rel=close)
        # Weights are drawn in the precision of the run, so 64-true begins with others, as under plain Lightning.
        exact = plain["64-true" if precision == "64-true" else "32-true"]
        assert own["losses"] == pytest.approx(exact["losses"], rel=max(close, 1e-4))
        assert own["losses"][-1] < 0.8 * own["losses"][0]
        assert own["metrics"]["val_loss"] == pytest.approx(plain[precision]["metrics"]["val_loss"], rel=close)
        assert own["dtypes"] == [str(PRECISIONS[precision])]
        assert own["predictions"] == 1


def test_logged_values_keep_their_digits_when_weights_have_few(layout_runs):
    for rank in layout_runs.notes(every_precision, "1+1"):
        value = torch.tensor(rank["bf16-true"]["metrics"]["train_loss"])
        assert float(value.bfloat16()) != float(value)


@pytest.mark.parametrize(
    ("name", "reference"), [("checkpointed", "dropout"), ("compiled", "plain"), ("plain", "plain")]
)
def test_a_half_may_be_checkpointed_or_compiled(layout_runs, name, reference):
    (plain,) = layout_runs.notes(every_module, "auto")
    for rank in layout_runs.notes(every_module, "1+1"):
        assert rank[name]["lengths"] == pytest.approx(rank[reference]["lengths"], rel=1e-9)
        assert rank[name]["metrics"] == pytest.approx(rank[reference]["metrics"], rel=1e-9)
        if reference == "plain":
            assert rank[name]["metrics"] == pytest.approx(plain["plain"]["metrics"], rel=1e-6)


def test_a_step_without_target_tokens_does_what_it_does_under_plain_lightning(layout_runs):
    (plain,) = layout_runs.notes(every_module, "auto")
    for rank in layout_runs.notes(every_module, "1+1"):
        assert rank["untargeted"]["metrics"] == pytest.approx(plain["untargeted"]["metrics"], rel=1e-9)
        for half, length in rank["untargeted"]["lengths"].items():
            assert length == pytest.approx(plain["untargeted"]["lengths"][half], rel=1e-9)
