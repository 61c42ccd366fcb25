"""A family without a class of its own, from its folder: words and pixels of its own processor, and a fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flowtrain_lightning as flow
from flowtrain_lightning.data.collate import pack_media
from flowtrain_lightning.models import AnyVLM, processor_of
from tests.models.both_processors import CONVERSATIONS, SIZES, Both, write_images
from tests.models.test_pretrained import CONFIGS, data_of, records, trainer  # noqa: F401

transformers = pytest.importorskip("transformers")

from tests.models.processors import PUBLISHED  # noqa: E402


def _images() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 224}, max_image_size={"longest_edge": 56})


IDEFICS3 = replace(
    PUBLISHED["smolvlm"],
    config=lambda: transformers.Idefics3Config(scale_factor=2, vision_config={"patch_size": 14}),
    image_processor=_images,
    processor="Idefics3Processor",
    settings={"image_seq_len": 4},
)


def published(folder: Path) -> Any:
    """Writes a folder as a small Idefics3 is published, weights and all; gives Hugging Face's processor."""
    theirs = IDEFICS3.save(folder)
    tokenizer, config = theirs.tokenizer, json.loads(json.dumps(CONFIGS["smolvlm"]))
    config["text_config"] |= {"vocab_size": len(tokenizer)}
    config["vision_config"] |= {"model_type": "idefics3_vision"}
    config |= {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model("idefics3", **config), dtype=torch.float32
    )
    model.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    return theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Both]:
    path = tmp_path_factory.mktemp("idefics3")
    theirs = published(path)
    return path, Both(theirs, processor_of(path), write_images(path), "idefics3")


@pytest.mark.full
@pytest.mark.parametrize("conversation", ["an image", "text alone", "several images"])
def test_conversations_become_the_tokens_of_its_own_processor(folder, conversation):
    both = folder[1]
    record = both.record(CONVERSATIONS[conversation])
    assert both.sequence(record).tokens.tolist() == both.expected(record)["input_ids"].tolist()


@pytest.mark.full
def test_pixels_are_those_of_its_own_processor_and_features_as_many_as_tokens(folder):
    path, both = folder
    module = flow.models.from_pretrained(path)
    module.configure_model()
    for file, (height, width) in zip(both.images, SIZES, strict=True):
        loaded = module.images.load_pixels(file)
        (given,) = module.images.inputs.of_items(pack_media([loaded]))
        expected = both.theirs.image_processor([Image.open(file)], return_tensors="np")
        assert np.array_equal(given["pixel_values"].numpy(), expected["pixel_values"])
        assert loaded.size == (height, width)
        assert len(module.encode(pack_media([loaded]))) == loaded.rows


@pytest.mark.full
def test_a_folder_is_enough_to_train_both_halves(folder, tmp_path, records):  # noqa: F811
    model = flow.models.from_pretrained(folder[0], lr=1e-3)
    assert type(model) is AnyVLM
    run = trainer(tmp_path)
    run.fit(model, data_of(records))
    assert run.global_step == 2
    before = transformers.AutoModelForImageTextToText.from_pretrained(folder[0]).state_dict()
    changed = {name for name, weight in model.model.named_parameters() if not weight.equal(before[name])}
    for half in model.halves.values():
        assert any(f"model.{name}".startswith(half) for name in changed), half
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    assert again.keys() == before.keys()
