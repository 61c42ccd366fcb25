"""No family's template takes a special token out of a record: not of texts, parts of them, tools, calls or names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.data import Record, TokenSequence
from flowtrain_lightning.data.records.formats import parse

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models.processor import Processor, processor_of  # noqa: E402
from tests.data.forging import conversation, judge, specials_in  # noqa: E402
from tests.models.processors import PUBLISHED, gemma_tokenizer  # noqa: E402

FAMILIES = [*PUBLISHED, "paligemma"]
IMAGE = (60, 60)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Processor, Any, Path]]:
    """A family's processor, its tokenizer of Hugging Face, and an image."""
    folder = tmp_path_factory.mktemp("families")
    Image.new("RGB", IMAGE).save(folder / "image.png")
    found: dict[str, tuple[Processor, Any]] = {}

    def made(family: str) -> tuple[Processor, Any, Path]:
        if family == "smolvlm" and importlib.util.find_spec("num2words") is None:
            pytest.skip("its processor needs num2words")
        if family not in found:
            path = folder / family
            if family == "paligemma":
                _save_paligemma(path)
            else:
                PUBLISHED[family].save(path)
            found[family] = processor_of(path), transformers.AutoTokenizer.from_pretrained(path)
        return *found[family], folder / "image.png"

    return made


def _save_paligemma(folder: Path) -> None:
    gemma_tokenizer("<image>").save_pretrained(folder)
    transformers.SiglipImageProcessorPil(size={"height": 56, "width": 56}).save_pretrained(folder)
    vision = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    transformers.PaliGemmaConfig(vision_config=vision).save_pretrained(folder)


def _writer(processor: Processor) -> Callable[[Record], TokenSequence]:
    def write(record: Record) -> TokenSequence:
        images = processor.images
        grid = images.size(*IMAGE, alone=len(record.media) == 1)
        rows = np.full(len(record.media), images.rows_of_features(grid, IMAGE), dtype=np.int64)
        return processor.template.sequence(record, processor.tokenizer, rows)

    return write


def _try_all(made: Callable[[str], tuple[Processor, Any, Path]], family: str, count: int) -> None:
    processor, given, image = made(family)
    specials = [str(token.content) for token in given.added_tokens_decoder.values() if token.special]
    ids = {given.convert_tokens_to_ids(name) for name in specials} - {given.unk_token_id}
    write = _writer(processor)
    for seed in range(count):
        pair = conversation(
            seed,
            specials,
            image,
            system=family != "paligemma",
            tools=family == "qwen3_vl",
            turns=2 - (family == "paligemma"),
        )
        judge(pair, write, ids, given.decode)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_forges_a_token(made, family):
    _try_all(made, family, 12)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_of_a_thousand_records_forges_a_token(made, family):
    _try_all(made, family, 1000)


JOINING = (
    "{%- for tool in tools or [] %}{{- '<' + tool.name + '>' + tool.description }}{%- endfor %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.name %}{{- message.name + message.title }}{%- endif %}"
    "{%- for part in message.content %}{{- part.text }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    "beside",
    [
        {"name": "<|im_", "title": "end|>"},
        {"name": "<", "title": "|im_end|>"},
        {"name": "<|im_end|", "title": ">"},
        {"name": " <|im_end", "title": "|> "},
    ],
)
def test_a_template_that_joins_names_joins_no_token(made, beside):
    found = _joined_by(made, {"role": "user", "content": "a", **beside})
    plain = _joined_by(made, {"role": "user", "content": "a", "name": "b", "title": "c"})
    assert found == plain


def test_a_template_that_writes_a_name_between_its_own_signs_makes_no_token(made):
    tools = [{"name": "|im_end|", "description": "<|im_"}, {"name": "b", "description": "end|>"}]
    plain = [{"name": "b", "description": "c"}] * 2
    assert _joined_by(made, {"role": "user", "content": "a"}, tools) == _joined_by(
        made, {"role": "user", "content": "a"}, plain
    )


def _joined_by(made: Callable[..., Any], turn: dict[str, Any], tools: Any = None) -> Any:
    """How often each special token stands in a turn, by a template that joins whatever it finds."""
    from flowtrain_lightning.models.image_words import image_words
    from flowtrain_lightning.models.processor_template import ProcessorTemplate

    processor, given, _ = made("qwen2_5_vl")
    template = ProcessorTemplate(given, JOINING, image_words("qwen2_5_vl", given, {}))
    turns = [turn, {"role": "assistant", "content": "b"}]
    record = parse({"messages": turns, "tools": tools}, "d.jsonl", 0, Path)
    sequence = template.sequence(record, processor.tokenizer, np.empty(0, np.int64))
    return specials_in(sequence, {number for number, token in given.added_tokens_decoder.items() if token.special})
