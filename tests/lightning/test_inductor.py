"""Halves compiled with torch's own compiler."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.lightning.run_context import RunContext, half_lengths, numbers
from tests.tiny import TinyVLM

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler"),
]


class Compiled(TinyVLM):
    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.compile(dynamic=True)

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone = torch.compile(self.backbone, dynamic=True)


def compile_both_halves(context: RunContext) -> None:
    for name, module in {"compiled": Compiled(), "plain": TinyVLM()}.items():
        trainer = context.trainer(max_steps=3, limit_val_batches=1, enable_checkpointing=False, precision="32-true")
        trainer.fit(module, context.data())
        context.notes[name] = {"lengths": half_lengths(module), "metrics": numbers(trainer.callback_metrics)}


LAYOUTS_OF_RUNS = {compile_both_halves: ("1+1",)}


def test_compiled_halves_train_like_plain_ones(layout_runs):
    for rank in layout_runs.notes(compile_both_halves, "1+1"):
        assert rank["compiled"]["metrics"] == pytest.approx(rank["plain"]["metrics"], rel=1e-3)
        assert rank["compiled"]["lengths"] == pytest.approx(rank["plain"]["lengths"], rel=1e-3)
