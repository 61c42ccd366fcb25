"""Families without a class: what was trained from their folder opens in Hugging Face, and answers there as here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image

import flowtrain_lightning as flow
from flowtrain_lightning.cli import main
from flowtrain_lightning.models import AnyVLM
from tests.models.test_any_family import IDEFICS3
from tests.models.test_pretrained import CONFIGS, QWEN_TEXT, SQUARE, TEXT, data_of, records  # noqa: F401

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.models.processors import PUBLISHED, Published  # noqa: E402

_PINPOINTS = [[56, 112], [112, 56], [112, 112]]
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}


def _next_images() -> Any:
    return transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=_PINPOINTS
    )


@dataclass(frozen=True)
class SmallFolder:
    """A family as it is published, but small.

    Attributes:
        read: its words and pixels.
        config: of the model, but for the ids of tokens.
        tokens: name of an id in the config -> token.
        opens: without torchvision ``AutoProcessor`` opens it.
    """

    read: Published
    config: dict[str, Any]
    tokens: dict[str, str]
    opens: bool = True

    def write(self, folder: Path, family: str) -> Path:
        """Writes it, weights and all."""
        theirs = self.read.make()
        tokenizer, config = theirs.tokenizer, json.loads(json.dumps(self.config))
        config["text_config"] |= {"vocab_size": len(tokenizer)}
        config |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in self.tokens.items()}
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.for_model(family, **config), dtype=torch.float32
        )
        for part in (model, tokenizer, theirs.image_processor):
            part.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(self.read.settings))
        (folder / "chat_template.jinja").write_text(theirs.chat_template)
        return folder


SMALL = {
    "idefics3": SmallFolder(
        IDEFICS3,
        {
            **CONFIGS["smolvlm"],
            "vision_config": {**SQUARE, "model_type": "idefics3_vision"},
            "tie_word_embeddings": False,
        },
        {"image_token_id": "<image>"},
    ),
    "llava_next": SmallFolder(
        Published(
            PUBLISHED["llava"].config,
            PUBLISHED["llava"].tokenizer,
            _next_images,
            "LlavaNextProcessor",
            "llava.jinja",
            PUBLISHED["llava"].settings,
        ),
        {**CONFIGS["llava"], "image_grid_pinpoints": _PINPOINTS},
        {"image_token_index": "<image>"},
    ),
    "qwen3_5": SmallFolder(
        PUBLISHED["qwen3_vl"],
        {
            "text_config": {**QWEN_TEXT, **TEXT, **_DELTA, **_LAYERS},
            "vision_config": {**_TOWER, "patch_size": 16, "num_position_embeddings": 16},
        },
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        opens=False,
    ),
}
_QUICK = ("idefics3",)
TOKENS = 6
FAMILIES = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.full) for name in SMALL]


def trained(folder: Path, records: Path, **settings: Any) -> Path:  # noqa: F811
    """The checkpoint of two steps of a model in ``folder/base``."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy="flowtrain", accelerator="cpu", devices=1, max_steps=2, default_root_dir=folder, **quiet
    )
    model = flow.models.from_pretrained(folder / "base", lr=1e-3, **settings)
    assert type(model) is AnyVLM
    trainer.fit(model, data_of(records))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """What the command writes of a checkpoint."""

    def export(checkpoint: Path) -> Path:
        command = ["flowtrain", "export", "--format", "hf", str(checkpoint), str(tmp_path / "tuned")]
        monkeypatch.setattr(sys, "argv", command)
        main()
        return tmp_path / "tuned"

    return export


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_opens_in_hugging_face_and_answers_as_here(tmp_path, records, export, family):  # noqa: F811
    base = SMALL[family].write(tmp_path / "base", family)
    tuned = export(trained(tmp_path, records, recompute=True, frozen=_decoder_embeddings(base)))
    weights, before = (
        transformers.AutoModelForImageTextToText.from_pretrained(each).state_dict() for each in (tuned, base)
    )
    assert weights.keys() == before.keys()
    same = {name for name, weight in weights.items() if weight.equal(before[name])}
    assert any("embed_tokens" in name for name in same)
    assert len(same) < len(weights) / 2
    found, expected = answers(tmp_path, tuned, records), own_answers(tuned, family, records)
    assert found == expected


@pytest.mark.full
@pytest.mark.parametrize("family", SMALL)
def test_adapters_open_in_peft_by_names_of_hugging_face(tmp_path, records, export, family):  # noqa: F811
    base = SMALL[family].write(tmp_path / "base", family)
    checkpoint = trained(tmp_path, records, adapters=peft.LoraConfig(r=2, target_modules="all-linear"))
    tuned = export(checkpoint)
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    opened = peft.PeftModel.from_pretrained(model, tuned)
    adapted = {name: weight for name, weight in opened.named_parameters() if "lora_B" in name}
    own = AnyVLM.load_from_checkpoint(checkpoint)
    of_module = dict(own.model.named_parameters())
    assert adapted
    for name, weight in adapted.items():
        assert weight.equal(of_module[name.removeprefix("base_model.model.")]), name
    assert any(weight.any() for weight in adapted.values())


def _decoder_embeddings(base: Path) -> str:
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    return {module: name for name, module in model.named_modules()}[model.get_input_embeddings()]


def answers(folder: Path, tuned: Path, records: Path) -> dict[int, list[int]]:  # noqa: F811
    """What a model of ours answers to each record."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy="auto", accelerator="cpu", devices=1, default_root_dir=folder, **quiet)
    model = flow.models.from_pretrained(tuned, max_new_tokens=TOKENS)
    steps = trainer.predict(model, flow.FlowDataModule(predict=records, token_budget=1024, global_batch_size=2)) or []
    return {number: tokens for step in steps for microbatch in step for number, tokens in microbatch}


def own_answers(tuned: Path, family: str, records: Path) -> dict[int, list[int]]:  # noqa: F811
    """What Hugging Face answers, by what it makes of records itself."""
    small = SMALL[family]
    processor = transformers.AutoProcessor.from_pretrained(tuned) if small.opens else small.read.make()
    model = transformers.AutoModelForImageTextToText.from_pretrained(tuned).eval()
    found = {}
    for number, line in enumerate(records.read_text().splitlines()):
        image = Image.open(records.parent / json.loads(line)["images"][0])
        turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        # A template that begins with the token that the tokenizer would add leaves one of them out.
        given = processor(text=text, images=[image], return_tensors="pt", add_special_tokens="bos" not in text)
        prompt = given["input_ids"].shape[1]
        found[number] = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)[0, prompt:].tolist()
    return found
