"""Records as TRL takes them become the tokens and labels that TRL makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.data import open_tokenizer
from flowtrain_lightning.data.records.formats import parse
from flowtrain_lightning.data.records.sample_tokens import token_sequence

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling  # noqa: E402

from flowtrain_lightning.models.processor import processor_of  # noqa: E402
from tests.models.processors import PUBLISHED  # noqa: E402

COMPLETIONS = [
    {"prompt": "What is this?", "completion": " A cat."},
    {"prompt": "What is this? A", "completion": " cat.\n"},
    {"prompt": "The c", "completion": "at sat."},
    {"prompt": "Hello\n", "completion": "\nuser"},
    {"prompt": "", "completion": "你好"},
    {"prompt": "What?", "completion": ""},
]
"""In some of which a token spans the border, as of two line breaks."""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_completions_of_plain_text_are_those_of_the_sft_trainer(tmp_path, family):
    given = PUBLISHED[family].tokenizer()
    given.pad_token = given.pad_token or given.eos_token
    records = [*COMPLETIONS, {"prompt": "b", "completion": f"c{given.eos_token}"}]
    tokenizer = open_tokenizer(given)
    for fields, row in zip(records, by_sft_trainer(tmp_path, given, records), strict=True):
        record = parse(fields, "d.jsonl", 0, Path)
        found = token_sequence(record, None, tokenizer, np.empty(0, np.int64))  # type: ignore[arg-type]
        assert found.tokens.tolist() == row["input_ids"], fields
        assert found.labels[:-1].tolist() == row["labels"][1:], fields
        asked = token_sequence(record, None, tokenizer, np.empty(0, np.int64), prompt=True)  # type: ignore[arg-type]
        assert asked.tokens.tolist() == given(fields["prompt"])["input_ids"], fields


def by_sft_trainer(folder: Path, tokenizer: Any, records: list[dict[str, str]]) -> Any:
    """Rows of what TRL makes of records."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **small)
    quiet = {"use_cpu": True, "bf16": False, "report_to": []}
    return trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=trl.SFTConfig(output_dir=str(folder), eos_token=tokenizer.eos_token, **quiet),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer,
    ).train_dataset


UNMARKED = [
    [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A cat."}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One. Two?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
    ],
]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "internvl", "gemma3"])
@pytest.mark.parametrize(("turns", "count"), zip(UNMARKED, (1, 2), strict=True), ids=["one image", "two images"])
def test_images_without_markers_stand_where_trl_puts_them(tmp_path, family, turns, count):
    theirs = PUBLISHED[family].save(tmp_path)
    theirs.tokenizer.pad_token = theirs.tokenizer.pad_token or theirs.tokenizer.eos_token
    ours = processor_of(tmp_path)
    paths = [tmp_path / f"{number}.png" for number in range(count)]
    for path in paths:
        Image.new("RGB", (60, 60), "red").save(path)
    found = DataCollatorForVisionLanguageModeling(theirs)(
        [{"messages": turns, "images": [Image.open(path) for path in paths]}]
    )["input_ids"][0]
    record = parse({"messages": turns, "images": [str(path) for path in paths]}, "d.jsonl", 0, Path)
    image = ours.template.image_id(ours.tokenizer)
    rows = np.full(count, int((found == image).sum()) // count, dtype=np.int64)
    tokens = ours.template.sequence(record, ours.tokenizer, rows).tokens.tolist()
    if family == "llava":  # TRL leaves its <s> away, which transformers writes where it generates
        assert tokens.pop(0) == ours.tokenizer.token_to_id("<s>")
    assert tokens == found.tolist()
