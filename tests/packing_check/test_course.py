"""What is no number is above every bound: NaN that packing makes is named, and NaN that is there anyway is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowtrain_lightning.data import PackedBatch, PackedMedia
from flowtrain_lightning.packing_check import report_of
from flowtrain_lightning.packing_check.passes import relative_errors
from tests.tiny import WIDTH, TinyVLM, tiny_data, write_records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 24)
    return folder


class ScalesByImages(TinyVLM):
    """Tokens scaled by the norm of what is made of their sample's images, if any; the root of 0 has no slope."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.pool = nn.Linear(WIDTH, WIDTH, bias=False)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        if "image" not in features:
            return given
        lengths = batch.cu_seqlens.diff().long()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        rows: Tensor = features["image"]
        sums = rows.new_zeros(len(lengths), WIDTH).index_add(0, owner[batch.media_positions["image"]], rows)
        norms = self.backbone.pool(sums).square().sum(-1).sqrt()
        scale = torch.where(norms > 0, norms, 0.0)
        return given | {"x": given["x"] * (1 + scale[owner, None])}


class ScalesPadded(TinyVLM):
    """The same in the encoder, with rows of pictures of unlike sizes padded to one length."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.gain = nn.Parameter(torch.ones(()))

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        (features,) = super().encode(media)
        parts = self.encoder.gain * nn.utils.rnn.pad_sequence(features.split(list(media.rows)), batch_first=True)
        norms = parts.square().sum(-1).sqrt()
        scaled = torch.where(norms[..., None] > 0, parts * norms[..., None], 0.0)
        return (torch.cat([part[:rows] for part, rows in zip(scaled, media.rows, strict=True)]),)


class IsNaN(TinyVLM):
    """A loss whose gradient is NaN for any sample."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return loss + (outputs - outputs).square().sum().sqrt(), tokens


@pytest.mark.parametrize(("module", "method"), [(ScalesByImages, "merge, backbone or loss"), (ScalesPadded, "encode")])
def test_nan_that_only_packing_makes_is_named(records, module, method):
    (finding,) = report_of(module(), tiny_data(records)).findings
    assert finding.kind == "numbers"
    assert finding.sentence.startswith(f"{method}: packed together there is something that is no number, NaN or")
    assert "torch.where" in finding.sentence


def test_where_each_sample_alone_gives_nan_nothing_is_proven(records):
    report = report_of(IsNaN(), tiny_data(records))
    assert report.findings == []
    (reason,) = report.unproven
    assert "something that is no number, NaN or infinite, for samples one by one" in reason


def test_what_is_no_number_is_infinitely_far():
    one, none = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert relative_errors({"a": one, "b": one}, {"a": none, "b": one}) == {"a": torch.inf, "b": 0.0}
    assert relative_errors({"a": none, "b": one}, {"a": none, "b": one}) == {"a": torch.inf, "b": 0.0}
