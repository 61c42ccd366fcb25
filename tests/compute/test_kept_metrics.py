"""What is tried counts for nothing in a user's own metrics."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from flowtrain_lightning.compute.kept_metrics import kept_metrics


@pytest.mark.parametrize("call", ["update", "__call__"])
@pytest.mark.parametrize("kind", [MeanMetric, CatMetric])
def test_values_after_a_trial_are_those_without_it(kind, call):
    module, alone = nn.Module(), kind()
    module.metric = kind()
    for metric in (module.metric, alone):
        metric.update(torch.tensor([1.0, 3.0]))
    with kept_metrics(module):
        getattr(module.metric, call)(torch.tensor([50.0]))
    for metric in (module.metric, alone):
        metric(torch.tensor(5.0))
    assert module.metric.compute().equal(alone.compute())
