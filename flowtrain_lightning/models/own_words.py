"""What a model's own processor writes for an image, asked of it once for every size."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flowtrain_lightning.models.asked_images import AskedImages, asked_images
from flowtrain_lightning.models.encoder_inputs import image_arguments
from flowtrain_lightning.models.family_traits import whole_of
from flowtrain_lightning.models.image_words import ImageWords
from flowtrain_lightning.models.published_config import image_token_id, without_foreign_code
from flowtrain_lightning.models.twin import twin_config

_SIZES_KEPT = 4096


def own_processor(model: str | Path, config: Any, tokenizer: Any, image_processor: Any) -> Any:
    """A model's processor of Hugging Face, without its videos: those need torchvision, and nothing here is one.

    Raises:
        ValueError: ``transformers`` has none for the family, or its files do not fit it.
    """
    from transformers import PROCESSOR_MAPPING, ProcessorMixin

    kind = PROCESSOR_MAPPING.get(type(config), None)
    if kind is None or not hasattr(kind, "replace_image_token"):
        raise ValueError(
            f"transformers has no processor that writes images for models of type {config.model_type!r}. Write a "
            "template: FlowDataModule(template=ChatTemplate(...))."
        )
    settings: dict[str, Any] = {}
    with suppress(OSError):  # a model whose processor has no file of its own
        settings, _ = ProcessorMixin.get_processor_dict(model)
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


def own_images(model: str | Path, config: Any) -> AskedImages:
    """Images by the processor of a model's folder, for an encoder that takes what that gives.

    Raises:
        ImportError: the processor needs a library that is not installed.
        ValueError: the encoder takes something else.
    """
    from transformers import AutoImageProcessor
    from transformers import AutoModelForImageTextToText as Maker

    with without_foreign_code(model):
        try:
            processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
        except (ValueError, ImportError):  # of a family that has none with this backend
            processor = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
    with torch.device("meta"):
        whole = whole_of(Maker.from_config(twin_config(config), trust_remote_code=False))
    return asked_images(processor, image_arguments(whole), config)


def counted_by_words(images: AskedImages, words: ImageWords) -> AskedImages:
    """The same images, of which each has as many rows of features as its words have tokens."""

    def count(height: int, width: int) -> int:
        return sum(words.write(0, (height, width))[1])

    return replace(images, count=count)


def own_words(processor: Any, images: AskedImages, config: Any, tokenizer: Any) -> ImageWords:
    """How images stand in the text of a model, by its own processor.

    Args:
        processor: of Hugging Face.
        images: of the model.
        config: the model's.
        tokenizer: the model's.

    Raises:
        ValueError: the processor names no token for images.
    """
    token = str(tokenizer.convert_ids_to_tokens(image_token_id(config)))
    placeholder = getattr(processor, "image_token", None)
    if not placeholder:
        raise ValueError(
            f"{type(processor).__name__} names no image_token, so that nobody knows where images go. Write a "
            "template: FlowDataModule(template=ChatTemplate(...))."
        )

    @lru_cache(_SIZES_KEPT)
    def written(size: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
        text = str(processor.replace_image_token(images.raw(*size), 0))
        runs = re.compile(f"(?:{re.escape(token)})+")
        counts = tuple(len(run.group()) // len(token) for run in runs.finditer(text))
        return runs.sub(lambda _: token, text), counts

    def write(rows: int, size: tuple[int, int]) -> tuple[str, list[int]]:
        text, counts = written(size)
        return text, list(counts)

    return ImageWords(str(placeholder), token, True, write)
