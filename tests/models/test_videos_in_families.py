"""Videos and images, packed, give the logits, losses and gradients of Hugging Face's own model, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("av")

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia
from flowtrain_lightning.data.loading.collate import pack_media, pack_sequences
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from tests.exactness.compare import error
from tests.models.clips import VIDEO_FAMILIES, video_data, video_family, write_video_records

SAMPLES = 6
PADDING = 5


class Samples:
    """A few samples, packed together and one by one."""

    def __init__(self, folder: Path, family: str) -> None:
        write_video_records(folder, SAMPLES)
        data = video_data(folder, family)
        data.setup("fit")
        samples = data.train_dataloader().steps.samples
        sizes = [samples.source.sizes(np.array([sample])) for sample in range(SAMPLES)]
        records = [samples.source.record(sample) for sample in range(SAMPLES)]
        self.sequences = [
            samples.sequence(record, int(size.tokens[0]), size.media_rows)
            for record, size in zip(records, sizes, strict=True)
        ]
        self.media = [
            [samples.media(record, sample, n, rows, epoch=0) for n, rows in enumerate(size.media_rows)]
            for sample, (record, size) in enumerate(zip(records, sizes, strict=True))
        ]

    def packed(self, in_pieces: bool) -> tuple[PackedBatch, PackedMedia]:
        """All samples; ``in_pieces`` every moment of a clip is a media item."""
        tokens = sum(map(len, self.sequences)) + PADDING
        items = [item for of_sample in self.media for item in of_sample]
        media = pack_media([part for item in items for part in (moments_of(item) if in_pieces else [item])])
        return pack_sequences(self.sequences, range(SAMPLES), pad_to=tokens), media.with_patches(media.patches.double())

    @property
    def single(self) -> Iterator[tuple[PackedBatch, list[LoadedMedia]]]:
        for number, (sequence, media) in enumerate(zip(self.sequences, self.media, strict=True)):
            yield pack_sequences([sequence], [number]), media


def moments_of(item: LoadedMedia) -> list[LoadedMedia]:
    return [item.between(number, number + 1) for number in range(item.parts)]


def patches_for_hugging_face(items: Sequence[LoadedMedia]) -> tuple[Tensor, Tensor]:
    """Its patches, in which channels come before frames, and its grids."""
    patches, grids = [], []
    for item in items:
        moments, frames = (1, 1) if item.clip is None else item.clip[:2]
        of_item = torch.from_numpy(item.patches).double().view(-1, frames, 3, item.pixels.shape[1] // 3).transpose(1, 2)
        patches.append(of_item.repeat(1, 1, 2 // frames, 1).flatten(1))
        grids.append([moments, *item.grid])
    return torch.cat(patches), torch.tensor(grids)


def as_hugging_face_takes_it(batch: PackedBatch, media: list[LoadedMedia], config: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": batch.tokens[None], "use_cache": False}
    kinds = (batch.tokens == config.image_token_id).int() + 2 * (batch.tokens == config.video_token_id).int()
    inputs["mm_token_type_ids"] = kinds[None]
    images, videos = ([item for item in media if (item.clip is None) is still] for still in (True, False))
    if images:
        inputs["pixel_values"], inputs["image_grid_thw"] = patches_for_hugging_face(images)
    if videos:
        inputs["pixel_values_videos"], inputs["video_grid_thw"] = patches_for_hugging_face(videos)
    if videos and config.model_type == "qwen2_5_vl":
        seconds = [item.clip.seconds for item in videos]
        inputs["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float32)
    return inputs


def theirs(model: Any, samples: Samples) -> dict[str, Any]:
    logits, losses = [], []
    for batch, media in samples.single:
        logits.append(model(**as_hugging_face_takes_it(batch, media, model.config)).logits[0])
        losses.append(functional.cross_entropy(logits[-1], batch.labels, ignore_index=IGNORED_LABEL, reduction="sum"))
    return computed(torch.cat(logits), torch.stack(losses).sum(), model)


def ours(module: Any, samples: Samples, in_pieces: bool) -> dict[str, Any]:
    batch, media = samples.packed(in_pieces)
    outputs = module.get_submodule(module.halves["backbone"][0])(**module.merge(batch, {"image": module.encode(media)}))
    return computed(module.logits(outputs)[:-PADDING], module.loss(outputs, batch)[0], module.model)


def computed(logits: Tensor, loss: Tensor, model: Any) -> dict[str, Any]:
    loss.backward()
    return {
        "logits": logits.detach(),
        "loss": loss.item(),
        "gradients": {name: weight.grad for name, weight in model.named_parameters()},
    }


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_packed_videos_and_images_compute_what_hugging_faces_model_does(family, in_pieces, tmp_path):
    samples, tiny = Samples(tmp_path, family), video_family(family)
    assert {item.clip is None for of_sample in samples.media for item in of_sample} == {True, False}
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        module = tiny.kind(tiny.config)
        module.configure_model()
        module.save_pretrained(tmp_path / "model")
        reference = type(module.model).from_pretrained(tmp_path / "model", dtype=torch.float64)
        found, expected = ours(module, samples, in_pieces), theirs(reference, samples)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-9)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert error(found["gradients"], expected["gradients"]) <= 1e-9
