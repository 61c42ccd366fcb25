"""Who trains an encoder whose features nobody uses is told so, once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.runtime.encoder_checks import UnusedFeatures
from tests.exactness.layouts import ranks_of, trainer_for
from tests.forks import Job, run_jobs
from tests.tiny import TinyVLM, tiny_data, write_records

STEPS = 10


def with_gradient(gradient: torch.Tensor | None) -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = gradient
    return [parameter]


@pytest.mark.parametrize("gradient", [None, torch.zeros(2)])
def test_no_gradient_for_ten_steps_is_told_once(gradient):
    watch = UnusedFeatures()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STEPS - 1):
            watch.look(with_gradient(gradient))
    with pytest.warns(UserWarning, match=r"in 10 steps with media none of its weights got a gradient"):
        watch.look(with_gradient(gradient))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.look(with_gradient(gradient))


def test_gates_that_open_later_are_no_fault():
    watch = UnusedFeatures()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.look(with_gradient(torch.zeros(2)))
        watch.look(with_gradient(torch.tensor([0.0, 1.0])))
        for _ in range(2 * STEPS):
            watch.look(with_gradient(None))


class IgnoresFeatures(TinyVLM):
    """Its backbone reads the text only."""

    def merge(self, batch: Any, features: dict[str, Any]) -> dict[str, Any]:
        return super().merge(batch, {})


def ignore_features(folder: Path, *, data: str, layout: str) -> None:
    """Trains a few epochs with pictures in every step."""
    trainer = trainer_for(layout, max_epochs=4, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(IgnoresFeatures(), datamodule=tiny_data(Path(data)))
    disconnect_groups()


@pytest.mark.parametrize("layout", ["1+1", pytest.param("colocated 2", marks=pytest.mark.full)])
def test_a_merge_that_ignores_the_features_is_told(tmp_path: Path, layout: str):
    write_records(tmp_path / "data", 40)
    arguments = {"data": str(tmp_path / "data"), "layout": layout}
    job = Job("train", "tests.runtime.test_encoder_checks:ignore_features", ranks_of(layout), arguments)
    assert run_jobs(tmp_path, [job])["train"].check().log.count("Does `merge` use the features") == 1
