"""The words of each family's processor in place of an image or a video."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class VideoWords:
    """Writes a video into the text of one family.

    Attributes:
        token: what the chat template writes for a video, and what stands for rows of features.
        timed: what is written depends on the times of the video's moments, not only on how many rows it has.
        write: rows of features, times of the moments in seconds -> the text, and how often each ``token`` in it stands.
    """

    token: str
    timed: bool
    write: Callable[[int, Sequence[float]], tuple[str, list[int]]]


@dataclass(frozen=True)
class ImageWords:
    """Writes an image into the text of one family.

    Attributes:
        placeholder: what the chat template writes for an image.
        token: stands for rows of features; where several follow each other it is written once, and said how often.
        tiled: what is written depends on how the image was cut into tiles, not only on how many rows it has.
        write: rows of features, rows and columns of tiles -> the text, and how often each ``token`` in it stands.
        videos: how a video stands there; None where the family takes none.
        audio: what the chat template writes for a clip of audio, and what stands for rows of features; None where the
            family takes none.
    """

    placeholder: str
    token: str
    tiled: bool
    write: Callable[[int, tuple[int, int]], tuple[str, list[int]]]
    videos: VideoWords | None = None
    audio: str | None = None


FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "llava_onevision", "internvl", "smolvlm"),
    *("gemma3", "paligemma"),
)
"""``model_type`` of the families whose words are known here."""


def image_words(family: str, tokenizer: Any, settings: Mapping[str, Any]) -> ImageWords:
    """Writes images into the text of a model.

    Args:
        family: its ``model_type``.
        tokenizer: the model's, of Hugging Face.
        settings: of the model's processor, as its files hold them.

    Raises:
        ValueError: the family is not known.
    """

    def named(attribute: str, usual: str) -> str:
        return str(getattr(tokenizer, attribute, None) or usual)

    match family:
        case "qwen2_vl" | "qwen2_5_vl":
            token = named("video_token", "<|video_pad|>")
            videos = VideoWords(token, False, lambda rows, times: (token, [rows]))
            return replace(_run(named("image_token", "<|image_pad|>")), videos=videos)
        case "qwen3_vl" | "qwen3_vl_moe":
            ends = named("vision_start_token", "<|vision_start|>"), named("vision_end_token", "<|vision_end|>")
            videos = _moments(named("video_token", "<|video_pad|>"), *ends)
            return replace(_run(named("image_token", "<|image_pad|>")), videos=videos)
        case "llava" | "llava_onevision" | "paligemma":
            return _run(named("image_token", settings.get("image_token", "<image>")))
        case "internvl":
            token = named("context_image_token", "<IMG_CONTEXT>")
            return _run(token, token, named("start_image_token", "<img>"), named("end_image_token", "</img>"))
        case "gemma3":
            begin, end = named("boi_token", "<start_of_image>"), named("eoi_token", "<end_of_image>")
            token = named("image_token", "<image_soft_token>")
            return _run(token, begin, f"\n\n{begin}", f"{end}\n\n")
        case "smolvlm":
            return _tiles(
                named("image_token", "<image>"),
                named("fake_image_token", "<fake_token_around_image>"),
                named("global_image_token", "<global-img>"),
            )
        case _:
            raise ValueError(
                f"How a model of type {family!r} writes images is not known here; known are Qwen2-VL, Qwen2.5-VL, "
                "Qwen3-VL, LLaVA-1.5, LLaVA-OneVision, InternVL3, SmolVLM2, Gemma 3 and PaliGemma. Write a template: "
                "FlowDataModule(template=ChatTemplate(...))."
            )


def _run(token: str, placeholder: str | None = None, before: str = "", after: str = "") -> ImageWords:
    """All rows of features one after another."""
    return ImageWords(placeholder or token, token, False, lambda rows, tiles: (f"{before}{token}{after}", [rows]))


def _tiles(token: str, border: str, whole: str) -> ImageWords:
    """SmolVLM's: tile by tile, each with its row and column, and last the whole image."""

    def write(rows: int, tiles: tuple[int, int]) -> tuple[str, list[int]]:
        high, wide = tiles
        text = ""
        for down in range(1, high + 1):
            text += "".join(f"{border}<row_{down}_col_{across}>{token}" for across in range(1, wide + 1)) + "\n"
        text += "\n" if high else ""
        number = high * wide + 1
        return f"{text}{border}{whole}{token}{border}", [rows // number] * number

    return ImageWords(token, token, True, write)


def _moments(token: str, start: str, end: str) -> VideoWords:
    """Qwen3-VL's: moment by moment, each behind its time."""

    def write(rows: int, times: Sequence[float]) -> tuple[str, list[int]]:
        text = "".join(f"<{time:.1f} seconds>{start}{token}{end}" for time in times)
        return text, [rows // len(times)] * len(times)

    return VideoWords(token, True, write)
