"""A module that says that it encodes the moments of a clip apart is believed only if it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("av")

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.models import QwenVLM
from flowtrain_lightning.packing_check import report_of
from tests.models.clips import video_data, video_family, write_video_records


class SeesTheWholeClip(QwenVLM):
    """Adds to the rows of a clip how many moments are encoded together."""

    def encode(self, media: PackedMedia) -> Any:
        rows, *others = super().encode(media)
        moments = torch.tensor([1 if clip is None else clip.moments for clip in media.clips] or [1] * len(media.rows))
        return rows + 0.01 * moments.repeat_interleave(torch.tensor(media.rows))[:, None], *others


@pytest.mark.parametrize("kind", [QwenVLM, SeesTheWholeClip])
def test_moments_are_compared_with_the_clip(tmp_path: Path, kind: type[QwenVLM]) -> None:
    write_video_records(tmp_path, 12)
    module = kind(video_family("qwen2_5_vl").config)
    found = report_of(module, video_data(tmp_path, "qwen2_5_vl")).findings
    assert [finding.kind for finding in found] == (["moments"] if kind is SeesTheWholeClip else [])
    assert all("encodes_moments_apart" in finding.sentence for finding in found)
