"""PaliGemma's words are those of its own processor, and everything up to the answer sees each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain_lightning.data import IGNORED_LABEL, DataError, TokenSequence
from flowtrain_lightning.data.loading.collate import pack_sequences
from flowtrain_lightning.data.records.formats import parse
from flowtrain_lightning.models.paligemma import prefix_blocks

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models.processor import processor_of  # noqa: E402
from tests.models.processors import gemma_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the model is published in, but for the weights."""
    folder = tmp_path_factory.mktemp("paligemma")
    gemma_tokenizer("<image>").save_pretrained(folder)
    transformers.SiglipImageProcessorPil(size={"height": 56, "width": 56}).save_pretrained(folder)
    transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    ).save_pretrained(folder)
    Image.new("RGB", (90, 60)).save(folder / "image.png")
    return folder


def written(folder: Path, asked: str, *answers: str, prompt: bool = False) -> TokenSequence:
    turns = [{"role": "user", "content": asked}, *({"role": "assistant", "content": text} for text in answers)]
    images = ["image.png"] * asked.count("<image>")
    record = parse({"messages": turns, "images": images}, "/d.jsonl", 0, folder.joinpath)
    ours = processor_of(folder)
    return ours.template.sequence(record, ours.tokenizer, np.full(len(images), 16), prompt=prompt)


@pytest.mark.parametrize("asked", ["<image>What is this?", "<image><image>What is\nthis?\n"])
def test_a_question_and_its_answer_are_a_prefix_and_a_suffix(folder, asked):
    images = transformers.SiglipImageProcessorPil.from_pretrained(folder)
    images.image_seq_length = 16
    theirs = transformers.PaliGemmaProcessor(images, transformers.AutoTokenizer.from_pretrained(folder))
    pictures = [[Image.open(folder / "image.png")] * asked.count("<image>")]
    expected = theirs(text=[asked], images=pictures, suffix=["A cat."])
    found = written(folder, asked, "A cat.")
    assert found.tokens.tolist() == list(expected["input_ids"][0])
    assert found.labels[:-1].tolist() == list(expected["labels"][0])[1:]
    asked_alone = theirs(text=[asked], images=pictures)["input_ids"][0]
    assert written(folder, asked, "A cat.", prompt=True).tokens.tolist() == list(asked_alone)


def test_more_than_one_answer_is_refused(folder):
    with pytest.raises(DataError, match="PaliGemma takes one question and one answer"):
        written(folder, "<image>What?", "A cat.", "A dog.")


def test_a_prefix_ends_with_the_token_that_predicts_the_first_of_the_answer():
    def sequence(*labels: int) -> Any:
        nothing = np.array([], dtype=np.int64)
        return TokenSequence(np.ones(len(labels), dtype=np.int64), np.asarray(labels), nothing, nothing, nothing)

    no = IGNORED_LABEL
    batch = pack_sequences([sequence(no, no, 7, 8, no), sequence(no, no), sequence(7, 8, no)], range(3), pad_to=12)
    assert prefix_blocks(batch).tolist() == [0, 0, 0, -1, -1, 0, 0, 0, -1, -1, 0, 0]
    assert prefix_blocks(batch).dtype == torch.int64
