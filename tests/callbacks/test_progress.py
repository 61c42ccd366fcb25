"""The progress bar says for what a rank waits."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest

from flowtrain_lightning.callbacks import FlowProgressBar
from tests.tiny import TinyVLM, tiny_data, write_records


class KeptBar(FlowProgressBar):
    """Keeps what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def get_metrics(self, *given: Any) -> dict[str, Any]:
        self.shown.append(super().get_metrics(*given))
        return self.shown[-1]


def slow(image, _):
    time.sleep(0.05)
    return image


@pytest.mark.parametrize("strategy", ["auto", "flowtrain"])
def test_a_rank_that_waits_for_data_is_told_by_how_much(tmp_path, strategy):
    write_records(tmp_path, 64)
    bar = KeptBar()
    settings = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "limit_val_batches": 0}
    L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=7,
        callbacks=[bar],
        default_root_dir=tmp_path,
        **settings,
    ).fit(TinyVLM(), tiny_data(tmp_path, augment=slow))
    shown = bar.shown[-1]
    assert 5 <= int(shown["waits for data"].removesuffix(" %")) <= 100
    assert "samples/s" in shown
