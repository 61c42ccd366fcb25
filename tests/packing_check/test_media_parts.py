"""A module that says that it encodes moments of clips or tiles of pictures apart is believed only if it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("av")

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.models import InternVLM, QwenVLM
from flowtrain_lightning.packing_check import report_of
from tests.exactness.data import steps_data, write_steps
from tests.models.clips import video_data, video_family, write_video_records
from tests.models.tiny import FAMILIES


class SeesTheWholeClip(QwenVLM):
    """Adds to the rows of a clip how many moments are encoded together."""

    def encode(self, media: PackedMedia) -> Any:
        rows, *others = super().encode(media)
        moments = torch.tensor([1 if clip is None else clip.moments for clip in media.clips] or [1] * len(media.rows))
        return rows + 0.01 * moments.repeat_interleave(torch.tensor(media.rows))[:, None], *others


class SeesTheWholePicture(InternVLM):
    """Adds to the rows of a picture how many patches are encoded together."""

    def encode(self, media: PackedMedia) -> Tensor:
        return (
            super().encode(media) + 0.01 * media.grid.prod(dim=1).repeat_interleave(torch.tensor(media.rows))[:, None]
        )


@pytest.mark.parametrize("kind", [QwenVLM, SeesTheWholeClip])
def test_moments_are_compared_with_the_clip(tmp_path: Path, kind: type[QwenVLM]) -> None:
    write_video_records(tmp_path, 12)
    module = kind(video_family("qwen2_5_vl").config)
    found = report_of(module, video_data(tmp_path, "qwen2_5_vl")).findings
    assert [finding.kind for finding in found] == (["parts"] if kind is SeesTheWholeClip else [])
    assert all("encodes_parts_apart" in finding.sentence for finding in found)


@pytest.mark.parametrize("kind", [InternVLM, SeesTheWholePicture])
def test_tiles_are_compared_with_the_picture(tmp_path: Path, kind: type[InternVLM]) -> None:
    write_steps(tmp_path)
    tiny = FAMILIES["internvl"]
    found = report_of(kind(tiny.config), steps_data(tmp_path, images=tiny.images, token_budget=160)).findings
    assert [finding.kind for finding in found] == (["parts"] if kind is SeesTheWholePicture else [])
    assert all("tiles of a picture" in finding.sentence for finding in found)
