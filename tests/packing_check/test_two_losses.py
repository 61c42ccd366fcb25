"""A second loss of the backbone is checked with the first: it too must be a sum over terms of single samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.packing_check import report_of
from tests.exactness.modules import Telling
from tests.exactness.two_losses import PLACES
from tests.tiny import tiny_data, write_records


class Averaging(Telling):
    """Its second loss is a mean."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> Any:
        losses = super().loss(outputs, batch)
        errors, count = losses[PLACES]
        return {**losses, PLACES: (errors / max(count, 1), count)}


class Unnamed(Telling):
    """Its second loss has another name than its weight."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> Any:
        losses = super().loss(outputs, batch)
        return {"backbone": losses["backbone"], "seats": losses[PLACES]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_records(folder, 8)
    return folder


def test_two_sums_pass(folder):
    assert report_of(Telling(), tiny_data(folder)).findings == []


def test_a_mean_beside_a_sum_is_found(folder):
    assert report_of(Averaging(), tiny_data(folder)).findings


def test_a_name_without_a_weight_is_refused(folder):
    with pytest.raises(TypeError, match=r"Unnamed\.loss .* return a dictionary of the losses 'backbone' and 'places'"):
        report_of(Unnamed(), tiny_data(folder))
