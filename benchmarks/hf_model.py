"""A small Qwen2.5-VL in a folder as models are published, and the records that everybody trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.modules import ROOT, SEED, TOKENIZER, training_records

PIXELS = {"min_pixels": 56 * 56, "max_pixels": 224 * 224}
MARKER = "<image>"

SIZES: dict[str, tuple[int, int]] = {"small": (192, 4), "tiny": (32, 1)}
"""Width and depth of both halves."""


def write_model(folder: Path, size: str) -> None:
    """Writes weights, tokenizer, chat template and image processor, for everybody to open by the folder's name.

    The template is Qwen's own with TRL's marks around what the assistant says, so that all learn the same tokens.
    """
    import transformers
    from trl.chat_template_utils import get_training_chat_template

    specials = {"eos_token": "<|im_end|>", "pad_token": "<|im_start|>"}
    tokenizer = transformers.Qwen2TokenizerFast(tokenizer_file=str(TOKENIZER), **specials)
    published = ROOT / "tests/models/chat_templates/qwen2_5_vl.jinja"
    tokenizer.chat_template = published.read_text(encoding="utf-8")
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model("qwen2_5_vl", **_config(size, tokenizer))
    images = transformers.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, **PIXELS)
    for part in (transformers.Qwen2_5_VLForConditionalGeneration(config), tokenizer, images):
        part.save_pretrained(folder)


def _config(size: str, tokenizer: Any) -> dict[str, Any]:
    width, depth = SIZES[size]
    heads = max(2, width // 48)
    sections = width // heads // 2
    rotary = {"rope_type": "default", "rope_theta": 1e6}
    rotary["mrope_section"] = [sections - 2 * (sections // 3), sections // 3, sections // 3]
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")}
    return {
        "text_config": {
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "vocab_size": len(tokenizer),
            "rope_parameters": rotary,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        "vision_config": {
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_heads": heads,
            "out_hidden_size": width,
            "fullatt_block_indexes": [depth - 1],
        },
        "image_token_id": ids["image_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "tie_word_embeddings": False,
    }


def processor(folder: Path) -> Any:
    """The model's processor as ``AutoProcessor`` makes it, but without videos: their processor needs torchvision."""
    import transformers

    class Processor(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc, name-defined]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

    Processor.__name__ = "Qwen2_5_VLProcessor"
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = tokenizer.chat_template
    return Processor(image_processor=images, tokenizer=tokenizer, video_processor=_NoVideos(), chat_template=template)


class _NoVideos:
    """Stands where a processor of videos would."""

    num_frames = fps = None


def write_records(file: Path, count: int, longest: int) -> None:
    """Real records in a random order, alike in each run, as JSON Lines with whole paths of images.

    Args:
        file: to write.
        count: of records.
        longest: characters of a record's text; longer ones are left out.
    """
    source = training_records()
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    records = [r for r in records if sum(len(turn["content"]) for turn in r["messages"]) <= longest]
    chosen = np.random.default_rng(SEED).permutation(len(records))[:count]
    if len(chosen) < count:
        raise ValueError(
            f"{source} has {len(records)} records of at most {longest} characters, but {count} are needed."
        )
    with file.open("w", encoding="utf-8") as out:
        for record in (records[number] for number in chosen):
            images = [{"path": str(source.parent / image["path"])} for image in record["images"]]
            out.write(json.dumps({"images": images, "messages": record["messages"]}) + "\n")


def as_rows(file: Path) -> Any:
    """The same records as a data set of Hugging Face in the form that TRL's pages show for vision."""
    import datasets

    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        turns = [{"role": turn["role"], "content": _parts(turn["content"])} for turn in record["messages"]]
        rows.append({"images": [image["path"] for image in record["images"]], "messages": turns})
    return datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))


def _parts(text: str) -> list[dict[str, str]]:
    """Text with markers as a list of images and texts."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARKER)):
        parts += [{"type": "image", "text": ""}] * (number > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts
