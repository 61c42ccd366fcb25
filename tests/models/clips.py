"""Records with videos, and models so small that a step with them takes milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from flowtrain_lightning.data import FlowDataModule, VideoProcessor
from flowtrain_lightning.models import Qwen3Videos, template_of
from tests.models.processors import PUBLISHED
from tests.models.tiny import FAMILIES, Family
from tests.tiny import IMAGES
from tests.tiny_videos import write_clip

VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_CLIPS = ((9, 12, 16, 3), (6, 16, 10, 2), (13, 8, 20, 5), (4, 24, 24, 1))
"""Frames, height, width and frames a second."""

_MEDIA = (("video", "image"), (), ("image",), ("video", "video"), ("image", "video", "image"), ("video",))
"""What the records have, in order; then it begins anew."""


def write_video_records(folder: Path, count: int) -> Path:
    """Records with images, with videos, with both and with none, and what they name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, clip in enumerate(_CLIPS):
        write_clip(folder / f"{number}.mkv", *clip, seed=number)
        Image.effect_noise((12 + 4 * number, 16), 90).convert("RGB").save(folder / f"{number}.png")
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(_record(number)) + "\n" for number in range(count)))
    return path


def _record(number: int) -> dict[str, Any]:
    media = _MEDIA[number % len(_MEDIA)]
    parts: list[dict[str, str]] = [{"type": "text", "text": f"{number}. "}]
    for place, kind in enumerate(media):
        name = f"{(number + place) % len(_CLIPS)}.{'mkv' if kind == 'video' else 'png'}"
        parts += [{"type": kind, kind: name}, {"type": "text", "text": " and"}]
    said = {"role": "assistant", "content": "The cat sat. " * (1 + number % 3)}
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": " what?"}]}, said]}


@cache
def tokenizer_of(family: str) -> Any:
    """A small tokenizer with the family's special tokens."""
    return PUBLISHED[family].tokenizer()


def videos_for(family: str) -> VideoProcessor:
    """At most three moments, of some blocks of patches."""
    sizes = {"patch_size": IMAGES.patch_size, "merge_size": IMAGES.merge_size, "fps": 2.0, "max_frames": 6}
    if family == "qwen3_vl":
        return Qwen3Videos(min_pixels=512, max_pixels=2048, **sizes)
    return VideoProcessor(min_pixels=128, max_pixels=384, **sizes)


def video_family(family: str) -> Family:
    """One of the tiny models, for the tokenizer with the family's special tokens."""
    tokenizer, tiny = tokenizer_of(family), FAMILIES[family]
    names = {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video")}
    names |= {f"vision_{end}_token_id": f"<|vision_{end}|>" for end in ("start", "end")}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    text = {**tiny.config["text_config"], "vocab_size": len(tokenizer)}
    return Family(tiny.kind, {**tiny.config, "text_config": text, **ids})


def video_data(
    folder: Path, family: str, train: Path | Sequence[Path] | None = None, **settings: Any
) -> FlowDataModule:
    """The records of a folder, as the family reads them; by default all of them in one step."""
    if not (folder / family).is_dir():
        PUBLISHED[family].save(folder / family)
    usual = {
        "videos": videos_for(family),
        "global_batch_size": len(_MEDIA),
        "token_budget": 4096,
        "shuffle": False,
        "seed": 0,
    }
    return FlowDataModule(
        train or folder / "train.jsonl",
        tokenizer=tokenizer_of(family),
        template=template_of(folder / family),
        images=IMAGES,
        **{**usual, **settings},
    )
