"""Packed microbatches give the logits, losses and gradients of Hugging Face's own model, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import flowtrain_lightning as flow
from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia
from flowtrain_lightning.data.loading.collate import pack_media, pack_sequences
from tests.exactness.compare import error
from tests.models.tiny import FAMILIES, Family, projector_of, tower_of
from tests.saved_tensors import SavedTensors
from tests.tiny import tiny_data, write_records

transformers = pytest.importorskip("transformers")

IMAGES_OF = (2, 0, 1, 3)
"""Of each sample."""

PADDING = 5
"""Tokens at the end of the microbatch."""

AS_HUGGING_FACE = {"dtype": torch.float64, "experts_implementation": "eager"}
"""How a model is opened for comparison; the experts that ``transformers`` takes by default know no float64."""


@pytest.fixture(scope="module", autouse=True)
def float64_throughout() -> Iterator[None]:
    """Gemma's norms and softmax compute in float32 whatever they are given; here what is compared is no rounding."""
    softmax = functional.softmax

    def double_softmax(scores: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(scores, dim=dim, dtype=scores.dtype if scores.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda tensor: tensor.double())
        patch.setattr(functional, "softmax", double_softmax)
        yield


class Samples:
    """A few samples, packed together and one by one, in float64."""

    def __init__(self, folder: Path, family: Family) -> None:
        write_records(folder, len(IMAGES_OF), pictures_of=IMAGES_OF)
        data = tiny_data(folder, images=family.images, global_batch_size=len(IMAGES_OF), token_budget=4096)
        data.setup("fit")
        samples = data.train_dataloader().steps.samples
        sizes = [samples.source.sizes(np.array([sample])) for sample in range(len(IMAGES_OF))]
        self._sequences = [
            samples.sequence(samples.source.record(s), int(size.tokens[0]), size.media_rows)
            for s, size in enumerate(sizes)
        ]
        self._images = [
            [samples.media(samples.source.record(s), s, n, rows, epoch=0) for n, rows in enumerate(size.media_rows)]
            for s, size in enumerate(sizes)
        ]

    @property
    def packed(self) -> tuple[PackedBatch, PackedMedia]:
        images = [image for of_sample in self._images for image in of_sample]
        tokens = sum(map(len, self._sequences)) + PADDING
        return pack_sequences(self._sequences, range(len(IMAGES_OF)), pad_to=tokens), exact(pack_media(images))

    @property
    def single(self) -> Iterator[tuple[PackedBatch, PackedMedia | None]]:
        for number, (sequence, images) in enumerate(zip(self._sequences, self._images, strict=True)):
            yield pack_sequences([sequence], [number]), exact(pack_media(images)) if images else None


def exact(media: PackedMedia) -> PackedMedia:
    return media.with_patches(media.patches.double())


def as_hugging_face_takes_it(batch: PackedBatch, media: PackedMedia | None, config: Any) -> dict[str, Any]:
    inputs = {"input_ids": batch.tokens[None], "use_cache": False}
    if config.model_type == "paligemma":
        learned = batch.labels[:-1] != IGNORED_LABEL
        inputs["token_type_ids"] = functional.pad(learned.cumsum(0).clamp(max=1), (1, 0))[None]
    if media is None:
        return inputs
    if config.model_type == "gemma3":
        inputs["token_type_ids"] = (batch.tokens == config.image_token_id).int()[None]
    if config.model_type in ("llava", "gemma3", "paligemma"):
        return {**inputs, "pixel_values": media.images()}
    if config.model_type == "internvl":
        return {**inputs, "pixel_values": flow.models.tile_images(media, high=4)}
    if config.model_type == "llava_onevision":
        each = replace(media, rows=tuple(media.grid.prod(dim=1).tolist()))
        sizes, images = torch.tensor(media.sizes), torch.tensor([len(media.sizes)])
        tiles = flow.models.tile_images(each, high=4)
        return {**inputs, "pixel_values": tiles, "image_sizes": sizes, "batch_num_images": images}
    if config.model_type == "smolvlm":
        return {**inputs, "pixel_values": flow.models.tile_images(media, high=4)[None]}
    still = media.patches.view(len(media.patches), 3, 1, -1).repeat(1, 1, 2, 1).flatten(1)
    grid = torch.tensor([[1, *sides] for sides in media.grid.tolist()])
    kinds = (batch.tokens == config.image_token_id).int()[None]
    return {**inputs, "pixel_values": still, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def gradients(model: Any) -> dict[str, Tensor | None]:
    inside = "parametrizations.image_newline.original"  # where a parameter of the model itself lies, in a half
    return {name.replace(inside, "image_newline"): weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """What the module computes packed, what Hugging Face's model computes of the same weights, and the module's model
    once it has Hugging Face's attention again."""
    folder = tmp_path_factory.mktemp("family")
    family = FAMILIES[request.param]
    samples = Samples(folder, family)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        module = family.kind(family.config)
        module.configure_model()
        module.save_pretrained(folder / "model")
        reference = type(module.model).from_pretrained(folder / "model", **AS_HUGGING_FACE)
        packed, single = ours(module, samples), theirs(reference, samples)
        module.model.zero_grad()
        module.model.set_attn_implementation(family.attention)
        return packed, single, theirs(module.model, samples)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.full) for name in ("llava with clip", "qwen2_5_vl"))]
)
def test_recomputing_keeps_less_and_changes_nothing(family, tmp_path):
    kept, found = {}, {}
    samples = Samples(tmp_path, FAMILIES[family])
    torch.set_default_dtype(torch.float64)
    try:
        for recompute in (False, "selective", True):
            torch.manual_seed(1)
            module = FAMILIES[family].kind(FAMILIES[family].config, recompute=recompute)
            module.configure_model()
            saved = SavedTensors()
            with saved_tensors_hooks(saved.pack, saved.unpack):
                found[recompute] = ours(module, samples)
            kept[recompute] = saved.most
    finally:
        torch.set_default_dtype(torch.float32)
    assert kept[True] < 0.7 * kept[False]
    for recompute in (True, "selective"):
        assert error(found[recompute]["gradients"], found[False]["gradients"]) <= 1e-12


def ours(module: Any, samples: Samples) -> dict[str, Any]:
    batch, media = samples.packed
    outputs = module.get_submodule(module.halves["backbone"][0])(**module.merge(batch, {"image": module.encode(media)}))
    loss, tokens = module.loss(outputs, batch)
    loss.backward()
    return {
        "logits": module.logits(outputs)[:-PADDING],
        "loss": loss,
        "tokens": tokens,
        "gradients": gradients(module.model),
    }


def theirs(model: Any, samples: Samples) -> dict[str, Any]:
    logits, losses, own_loss, tokens = [], [], 0.0, 0
    for batch, media in samples.single:
        labels = torch.cat(
            [torch.tensor([IGNORED_LABEL]), batch.labels[:-1]]
        )  # Hugging Face's model shifts them itself
        output = model(**as_hugging_face_takes_it(batch, media, model.config), labels=labels[None])
        logits.append(output.logits[0])
        losses.append(functional.cross_entropy(logits[-1], batch.labels, ignore_index=IGNORED_LABEL, reduction="sum"))
        targets = int((batch.labels != IGNORED_LABEL).sum())
        own_loss += output.loss.item() * targets
        tokens += targets
    loss = torch.stack(losses).sum()
    loss.backward()
    computed = {"logits": torch.cat(logits), "loss": loss, "tokens": tokens, "gradients": gradients(model)}
    return {**computed, "own loss": own_loss}


def test_logits_are_those_of_each_sample_alone(computed):
    found, expected, _ = computed
    assert found["logits"].shape == expected["logits"].shape
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-9)


def test_the_loss_is_the_sum_over_the_target_tokens(computed):
    found, expected, _ = computed
    assert found["tokens"] == expected["tokens"] > 0
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-9)
    assert found["loss"].item() == pytest.approx(expected["own loss"], rel=1e-6)  # it computes its loss in float32


def test_gradients_are_those_of_hugging_faces_model(computed):
    found, expected, _ = computed
    assert error(found["gradients"], expected["gradients"]) <= 1e-9


def test_the_model_can_be_used_as_hugging_face_does(computed):
    _, expected, found = computed
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-9)
    assert error(found["gradients"], expected["gradients"]) <= 1e-9


PROJECTING = sorted({name for name in FAMILIES if FAMILIES[name].kind.projector} - {"qwen2_vl, tied"})
FEW = ("llava with clip", "qwen3_vl_moe", "gemma3")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in PROJECTING]
)
def test_a_projector_of_the_backbone_half_has_the_gradients_of_hugging_faces_model(name, tmp_path):
    family, samples = FAMILIES[name], Samples(tmp_path, FAMILIES[name])
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        module = family.kind(family.config, frozen=tower_of(name))
        module.configure_model()
        assert {f"model.{path}" for path in projector_of(name)} <= {*module.halves["backbone"]}
        module.model.save_pretrained(tmp_path / "model")
        reference = type(module.model).from_pretrained(tmp_path / "model", **AS_HUGGING_FACE)
        for path in tower_of(name):
            reference.get_submodule(path).requires_grad_(False)
        found, expected = ours(module, samples), theirs(reference, samples)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-9)
    assert error(found["gradients"], expected["gradients"]) <= 1e-9
    for path in projector_of(name):
        assert all(weight.grad is not None for weight in module.model.get_submodule(path).parameters())
