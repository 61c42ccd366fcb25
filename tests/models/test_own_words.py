"""Processors of families that are asked: named by a folder's files, of other tokens, and of other lists of images."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models.own_words import own_processor, own_words  # noqa: E402
from tests.models.processors import PUBLISHED  # noqa: E402


def qwen3_processor(folder: Path) -> Any:
    """Of a family without a processor of its own, whose files name Qwen3-VL's."""
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    published = PUBLISHED["qwen3_vl"]
    config = SimpleNamespace(model_type="cosmos3_omni")
    return own_processor(folder, config, published.tokenizer(), published.image_processor())


def test_a_processor_that_files_name_writes_the_images_of_a_family_without_one(tmp_path):
    processor = qwen3_processor(tmp_path)
    token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    words = own_words(processor, SimpleNamespace(image_token_id=token), processor.tokenizer)
    assert words.placeholder == "<|image_pad|>"
    text, (rows,) = words.write(0, (64, 96))
    assert text == "<|image_pad|>"
    assert rows == 6


def test_without_a_name_it_is_said_what_the_files_lack(tmp_path):
    published = PUBLISHED["qwen3_vl"]
    config = SimpleNamespace(model_type="cosmos3_omni")
    with pytest.raises(
        ValueError, match=r"has no processor .* 'cosmos3_omni', and the files of .* \(processor_class\)"
    ):
        own_processor(tmp_path, config, published.tokenizer(), published.image_processor())


class Refuses:
    """A processor that takes no lists of a text's images, and whose template writes another token than for rows."""

    image_token = "<|image_pad|>"
    image_placeholder_token = "<image>"

    def __call__(self, text: list[str], images: list[Any], **_: Any) -> Any:
        if isinstance(images[0], list) or text != ["<image>"]:
            raise ValueError("no lists")
        return {"text_replacement_offsets": [[{"replacement": "<img>" + 4 * self.image_token + "</img>"}]]}


def test_a_processor_that_takes_no_lists_is_asked_without():
    tokenizer = PUBLISHED["qwen3_vl"].tokenizer()
    config = SimpleNamespace(image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    words = own_words(Refuses(), config, tokenizer)
    assert words.placeholder == "<image>"
    assert words.write(0, (60, 84)) == ("<img><|image_pad|></img>", [4])
