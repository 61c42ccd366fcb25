"""A family without a class of its own, from its folder: words and pixels of its own processor, and a fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flowtrain_lightning as flow
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.models import AnyVLM, SmolVLM, module_class, pretrained, processor_of
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


PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Any family")[2].partition("\n## ")[0]
NAME = "HuggingFaceM4/Idefics3-8B-Llama3"


@pytest.mark.full
def test_the_page_takes_idefics3_from_nothing_to_a_training(folder, tmp_path, monkeypatch, records):  # noqa: F811
    monkeypatch.chdir(records.parent)
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL) if NAME in block)
    assert len(example.splitlines()) < 30
    here = example.replace(NAME, str(folder[0])).replace('devices=8, precision="bf16-mixed"', 'accelerator="cpu"')
    names: dict[str, Any] = {}
    exec(here.replace("max_epochs=1", "max_epochs=1, devices=1, logger=False"), names)
    assert type(names["model"]) is AnyVLM
    assert names["trainer"].global_step > 0
    before, after = (
        transformers.AutoModelForImageTextToText.from_pretrained(place).state_dict() for place in (folder[0], "tuned")
    )
    assert before.keys() == after.keys()
    assert not all(weight.equal(before[name]) for name, weight in after.items())


@pytest.fixture
def idefics3_as_smolvlm(monkeypatch: pytest.MonkeyPatch) -> type[SmolVLM]:
    """A class of a user's own, of two lines, as the page has it."""
    trained = list(pretrained.TRAINED)
    monkeypatch.setattr(pretrained, "TRAINED", trained)
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "register" in block)
    names: dict[str, Any] = {"flow": flow}
    exec(example, names)
    return names["Idefics3VLM"]


@pytest.mark.full
def test_a_class_of_two_lines_reads_and_encodes_as_the_family_that_it_is_made_of(tmp_path, idefics3_as_smolvlm):
    path = tmp_path / "idefics3"
    both = Both(published(path), processor_of(path), write_images(tmp_path), "idefics3")
    module = flow.models.from_pretrained(path)
    assert type(module) is module_class("idefics3") is idefics3_as_smolvlm
    record = both.record(CONVERSATIONS["several images"])
    expected = both.expected(record)["input_ids"].tolist()
    assert replace(both, ours=module.processor).sequence(record).tokens.tolist() == expected
    module.configure_model()
    media = [module.images.load_pixels(file) for file in both.images[:2]]
    assert len(module.encode(pack_media(media))) == sum(each.rows for each in media)


def test_what_is_no_class_of_models_is_not_registered():
    with pytest.raises(TypeError, match="families = "):
        flow.models.register(AnyVLM)


def test_a_part_that_nobody_asks_for_is_not_built(tmp_path):
    published(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    read = flow.models.Processor(tmp_path)
    assert read.tokenizer.token_to_id("<image>") is not None
    with pytest.raises((OSError, ValueError)):
        _ = read.images
