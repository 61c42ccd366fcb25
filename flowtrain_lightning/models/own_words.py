"""The words that a model's own processor writes for an image, asked of it once for every size."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flowtrain_lightning.models.asked_images import AskedImages, asked_images, grey
from flowtrain_lightning.models.encoder_inputs import image_arguments
from flowtrain_lightning.models.family_traits import whole_of
from flowtrain_lightning.models.image_words import ImageWords
from flowtrain_lightning.models.published_config import audio_token_id, image_token_id, without_foreign_code
from flowtrain_lightning.models.twin import twin_config

_SIZES_KEPT = 4096
_THINKER = "_thinker"
"""Behind the family of an omni model, means the part of it that reads; they have one processor."""


def own_processor(model: str | Path, config: Any, tokenizer: Any, image_processor: Any) -> Any:
    """A model's processor of Hugging Face, without its videos: those need torchvision, and nothing here is one.

    Raises:
        ValueError: ``transformers`` has none for the family, or its files do not fit it.
    """
    import transformers

    settings: dict[str, Any] = {}
    with suppress(OSError):  # a model whose processor has no file of its own
        settings, _ = transformers.ProcessorMixin.get_processor_dict(model)
    family, mapping = config.model_type.removesuffix(_THINKER), transformers.PROCESSOR_MAPPING
    # Families without a processor of their own name in their files whose they have, as GLM-OCR does.
    named = settings.get("processor_class") or tokenizer.init_kwargs.get("processor_class") or ""
    kinds = (mapping.get(type(config), None), mapping.get(transformers.CONFIG_MAPPING.get(family, type(config)), None))
    kind = next((kind for kind in (*kinds, getattr(transformers, named, None)) if kind is not None), None)
    if kind is None or not hasattr(kind, "replace_image_token"):
        raise ValueError(
            f"transformers has no processor that writes images for models of type {config.model_type!r}, and the "
            f"files of {model} name none that does (processor_class). Write a template: "
            "FlowDataModule(template=ChatTemplate(...))."
        )
    known = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in settings.items() if name in known and not isinstance(value, Mapping)}
    given |= {"image_processor": image_processor, "tokenizer": tokenizer}
    others = {name for name in known if name.endswith(("video_processor", "feature_extractor"))}
    given |= {name: SimpleNamespace(merge_size=1, num_frames=None, fps=None) for name in others}
    return _lenient(kind, {*others, "image_processor"})(**given)


def _lenient(kind: Any, parts: set[str]) -> Any:
    """A processor class that takes anything for some of its parts."""

    def checked(self: Any, name: str, argument: Any) -> Any:
        return type(argument) if name in parts else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": checked})


def own_image_processor(model: str | Path) -> Any:
    """The image processor of a model's folder, with its Pillow backend where it has one.

    Raises:
        ImportError: it needs a library that is not installed.
        ValueError: it is code that comes with the model.
    """
    from transformers import AutoImageProcessor

    with without_foreign_code(model):
        try:
            return AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
        except (ValueError, ImportError):  # of a family that has none with this backend
            return AutoImageProcessor.from_pretrained(model, trust_remote_code=False)


def own_images(processor: Any, config: Any) -> AskedImages:
    """Images by a model's own processor.

    Args:
        processor: of Hugging Face; see `own_processor`.
        config: the model's.

    Raises:
        ValueError: the encoder takes something else.
    """
    from transformers import AutoModelForImageTextToText as Maker

    with torch.device("meta"):
        whole = whole_of(Maker.from_config(twin_config(config), trust_remote_code=False))
    return asked_images(processor.image_processor, image_arguments(whole), config, partial(_of_image, processor))


def _of_image(processor: Any, image: Any) -> Any:
    return _asked(processor, image, return_tensors="np")


def _asked(processor: Any, image: Any, **options: Any) -> Any:
    """All that a processor gives for an image and the text that stands for it."""
    text = [_placeholder(processor)]
    try:
        return processor(text=text, images=[[image]], **options)
    except ValueError:  # as of GOT-OCR, which takes no lists of a text's images
        return processor(text=text, images=[image], **options)


def _placeholder(processor: Any) -> str:
    """The token that a chat template writes for an image; empty where a processor names none."""
    return str(getattr(processor, "image_placeholder_token", None) or getattr(processor, "image_token", None) or "")


def counted_by_words(images: AskedImages, words: ImageWords) -> AskedImages:
    """The same images, of which each has as many rows of features as its words have tokens."""

    def count(height: int, width: int) -> int:
        return sum(words.write(0, (height, width))[1])

    return replace(images, count=count)


def own_words(processor: Any, config: Any, tokenizer: Any) -> ImageWords:
    """Writes images into the text of a model, by its own processor.

    Args:
        processor: of Hugging Face.
        config: the model's.
        tokenizer: the model's.

    Raises:
        ValueError: the processor names no token for images.
    """
    token = str(tokenizer.convert_ids_to_tokens(image_token_id(config)))
    placeholder = _placeholder(processor)
    if not placeholder:
        raise ValueError(
            f"{type(processor).__name__} names no image_token, so that nobody knows where images go. Write a "
            "template: FlowDataModule(template=ChatTemplate(...))."
        )

    @lru_cache(_SIZES_KEPT)
    def written(size: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
        asked = _asked(processor, grey(*size), return_text_replacement_offsets=True)
        text = str(asked["text_replacement_offsets"][0][0]["replacement"])
        runs = re.compile(f"(?:{re.escape(token)})+")
        counts = tuple(len(run.group()) // len(token) for run in runs.finditer(text))
        return runs.sub(lambda _: token, text), counts

    def write(rows: int, size: tuple[int, int]) -> tuple[str, list[int]]:
        text, counts = written(size)
        return text, list(counts)

    audio = getattr(processor, "audio_token", None) if audio_token_id(config) is not None else None
    return ImageWords(placeholder, token, True, write, audio=audio)
