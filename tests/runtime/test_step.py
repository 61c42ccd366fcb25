"""What a rank works with in a step: forwards that only other ranks need leave nothing behind."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torchmetrics import SumMetric

from flowtrain_lightning.compute.kept_metrics import kept_metrics
from flowtrain_lightning.parallel.role_buffers import RoleBuffers
from flowtrain_lightning.runtime.step import RankContext


class Counting(nn.Module):
    """A half that keeps running statistics, and a metric beside it."""

    halves: ClassVar = {"backbone": ("backbone",)}

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.metric = nn.BatchNorm1d(2), SumMetric()

    def forward(self) -> None:
        self.backbone(torch.ones(3, 2))
        self.metric.update(1.0)


def test_a_forward_of_padding_leaves_nothing_in_buffers_and_metrics() -> None:
    module = Counting()
    buffers = RoleBuffers(module, "backbone", None, torch.device("cpu"))
    context = RankContext(None, None, None, None, {}, partial(kept_metrics, module))  # type: ignore[arg-type]
    module()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with context.leaving_nothing(buffers):
        module()
    assert all(buffer.equal(before[name]) for name, buffer in module.named_buffers())
    assert (int(module.backbone.num_batches_tracked), float(module.metric.compute())) == (1, 1.0)
    module()
    assert (int(module.backbone.num_batches_tracked), float(module.metric.compute())) == (2, 2.0)
