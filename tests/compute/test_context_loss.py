"""Whether a loss adds up over parts of a microbatch shows in its own values, finer than in what ranks compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import flowtrain_lightning as flow
from flowtrain_lightning.compute.context_loss import LossInParts
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data import PackedBatch
from tests.compute.test_context_check import packed

TYPES = [torch.float64, torch.float32, torch.bfloat16]


class Sums(flow.FlowModule):
    """Its loss is a sum over targets, as it should be."""

    def loss(self, outputs: Any, batch: PackedBatch) -> tuple[Tensor, int]:
        return self.summed(outputs, batch), len(batch.targets)

    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        return functional.cross_entropy(outputs, batch.labels, reduction="sum")


class InItsType(Sums):
    """Computes in the type of its outputs, and logs."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        self.log("own", outputs.mean())
        return -(outputs.log_softmax(1)[batch.targets, batch.labels[batch.targets]]).sum(), len(batch.targets)


class NearZero(Sums):
    """As of policy gradients: terms of both signs."""

    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        each = functional.cross_entropy(outputs.float(), batch.labels, reduction="none")
        return (each * torch.sin(1e3 * batch.tokens)).sum()


class WeighsByTokens(Sums):
    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        return super().summed(outputs, batch) * len(batch.targets) / len(batch.tokens)


class WeighsALittle(Sums):
    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        return super().summed(outputs, batch) * (1 + 0.05 * len(batch.targets) / len(batch.tokens))


class Mean(Sums):
    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        return functional.cross_entropy(outputs, batch.labels)


class CentresLosses(Sums):
    """Takes the mean over this microbatch away: a baseline."""

    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        each = functional.cross_entropy(outputs, batch.labels, reduction="none")[batch.targets]
        return (each * (each - each.mean()).detach()).sum()


def compared(module: flow.FlowModule, outputs: Any, batch: PackedBatch) -> Any:
    """What `LossInParts` says after one call of the loss."""
    parts = LossInParts(module)
    with parts.noting(len(batch.tokens)), module.logging_into(MetricAccumulator()):
        module.loss(outputs, batch)
    assert "loss" not in vars(module)
    return parts.compare(lambda function: function())


def outputs_for(batch: PackedBatch, dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(0)
    return torch.randn(len(batch.tokens), 64, generator=chance, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("module", [Sums, InItsType, NearZero])
@pytest.mark.parametrize("lengths", [(60, 40, 20), (200, 300), (11,)])
def test_a_sum_over_tokens_adds_up(module, dtype, lengths):
    batch = packed(*lengths)
    found = compared(module(), outputs_for(batch, dtype), batch)
    assert not found.differ


@pytest.mark.parametrize("lengths", [(60, 40, 20), (200, 300)])
@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        *((module, dtype) for module in (WeighsByTokens, Mean) for dtype in TYPES),
        # In bfloat16 half a per cent is rounding, and much more of a loss whose terms cancel.
        *((module, dtype) for module in (WeighsALittle, CentresLosses) for dtype in TYPES[:2]),
    ],
)
def test_a_loss_that_is_weighed_with_what_it_is_given_does_not(module, dtype, lengths):
    batch = packed(*lengths)
    found = compared(module(), outputs_for(batch, dtype), batch)
    assert found.differ


class KeepsWeights(Sums):
    """Weighs tokens with what its `merge` has left."""

    weights = torch.ones(120)

    def summed(self, outputs: Any, batch: PackedBatch) -> Tensor:
        each = functional.cross_entropy(outputs, batch.labels, reduction="none")
        return (each * self.weights).sum()


@dataclass
class Named:
    """Outputs by name, as of Hugging Face's models."""

    logits: Tensor
    hidden: Tensor | None = None
    aux: Tensor | None = None


class TakesNamed(WeighsByTokens):
    def summed(self, outputs: Named, batch: PackedBatch) -> Tensor:
        return super().summed(outputs.logits[0], batch)


def test_outputs_may_have_names_and_of_more_than_rows_nothing_is_said():
    batch, module = packed(60, 40, 20), TakesNamed()
    rows = outputs_for(batch, torch.float32)[None]
    assert compared(module, Named(rows), batch).differ
    assert compared(module, Named(rows, aux=torch.ones(())), batch) is None


def test_a_loss_that_cannot_be_taken_of_parts_is_left_to_the_gradients():
    batch = packed(60, 40, 20)
    assert compared(KeepsWeights(), outputs_for(batch, torch.float32), batch) is None
