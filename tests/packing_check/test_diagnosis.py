"""Sentences of the check lead to what is to be done: mistakes of newcomers, and what mends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

from flowtrain_lightning.data import PackedBatch, PackedMedia
from flowtrain_lightning.packing_check import report_of
from tests.tiny import WIDTH, TinyVLM, tiny_data, write_records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 24)
    return folder


class LabelsTooLate(TinyVLM):
    """Labels that are shifted already, compared with the outputs of the token behind."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        labels = batch.labels[:-1]
        return functional.cross_entropy(outputs[1:], labels, reduction="sum"), int((labels != -100).sum())


class KeepsAllPatches(TinyVLM):
    """An encoder that joins no patches, though its images promise a row for four."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return (self.encoder.embed(media.patches),)


class Normalises(TinyVLM):
    """A layer that normalises by the statistics of the encoder batch."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.norm = nn.BatchNorm1d(WIDTH)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return tuple(self.encoder.norm(each) for each in super().encode(media))


class IsFrozenInTrain(Normalises):
    """Statistics that are frozen in a method that Lightning never calls."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if hasattr(self, "encoder"):
            self.encoder.norm.eval()
        return self


class IsFrozen(Normalises):
    """Statistics that are frozen as the sentence says."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.norm.eval()


def test_labels_a_place_too_late_are_named(records):
    (finding,) = report_of(LabelsTooLate(), tiny_data(records)).findings
    assert finding.kind == "labels"
    assert "it teaches each token to repeat itself" in finding.sentence


@pytest.mark.parametrize("module", [Normalises, IsFrozenInTrain])
def test_statistics_of_a_batch_are_frozen_where_their_layer_is_built(records, module):
    (finding,) = report_of(module(), tiny_data(records)).findings
    assert "call eval() on the layer where it is built" in finding.sentence
    assert report_of(IsFrozen(), tiny_data(records)).findings == []


def test_features_of_another_number_are_told_as_in_training(records):
    with pytest.raises(ValueError, match=r"KeepsAllPatches\.encode returned \d+ rows of features for 1 media items"):
        report_of(KeepsAllPatches(), tiny_data(records))
