"""What a pretrained model reads: its tokenizer, chat template, images and videos, from its name or folder."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain_lightning.data import ImageProcessor, Tokenizer, VideoProcessor, open_tokenizer
from flowtrain_lightning.models.huggingface_images import HuggingFaceImages
from flowtrain_lightning.models.image_words import FAMILIES, image_words
from flowtrain_lightning.models.images import images_of
from flowtrain_lightning.models.own_words import (
    counted_by_words,
    own_image_processor,
    own_images,
    own_processor,
    own_words,
)
from flowtrain_lightning.models.processor_template import ProcessorTemplate, Tiles
from flowtrain_lightning.models.published_config import read_config, refuse_missing_library
from flowtrain_lightning.models.videos import videos_of

_PALIGEMMA_TEMPLATE = """
{%- if messages | length > 2 or messages[0]['role'] != 'user' -%}
    {{- raise_exception('PaliGemma takes one question and one answer, without a system turn') -}}
{%- endif -%}
{%- for part in messages[0]['content'] if part['type'] == 'image' -%}<image>{%- endfor -%}
{{- bos_token -}}
{%- for part in messages[0]['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{{- '\n' -}}
{%- if messages | length == 2 -%}
    {%- generation -%}
        {%- for part in messages[1]['content'] -%}{{- part['text'] -}}{%- endfor -%}{{- eos_token -}}
    {%- endgeneration -%}
{%- endif -%}
"""
"""PaliGemma is published without one; this writes what its processor writes of a prefix and a suffix."""


@dataclass(frozen=True)
class Processor:
    """What a model reads, for ``FlowDataModule``.

    Attributes:
        tokenizer: text to ids and back.
        template: how a conversation is written.
        images: what becomes of images.
        videos: what becomes of videos; None of a model that takes none.
    """

    tokenizer: Tokenizer
    template: ProcessorTemplate
    images: ImageProcessor
    videos: VideoProcessor | None


def processor_of(model: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    """All that the data module needs to know of a model. See `template_of` and `images_of`.

    Args:
        model: the model's name or folder.
        min_pixels: of an image, in place of the model's own; for Qwen alone.
        max_pixels: of an image, in place of the model's own; for Qwen alone.

    Raises:
        ValueError: something of it is not known here.
    """
    tokenizer, config = _tokenizer(model), read_config(model)
    if config.model_type not in FAMILIES:
        return _own(model, config, tokenizer)
    images = images_of(model, min_pixels, max_pixels)
    tiles = images.tiles_of if isinstance(images, HuggingFaceImages) else None
    return Processor(open_tokenizer(tokenizer), _template(model, tokenizer, tiles), images, videos_of(model))


def _own(model: str | Path, config: Any, tokenizer: Any) -> Processor:
    """Of a family whose words and pixels nobody has written down here: by its own processor."""
    processor = own_processor(model, config, tokenizer, own_image_processor(model))
    words, images = own_words(processor, config, tokenizer), own_images(processor, config)
    images = counted_by_words(images, words)
    template = ProcessorTemplate(tokenizer, _chat_template(model, config, tokenizer)[0], words, images.tiles_of)
    return Processor(open_tokenizer(tokenizer), template, images, None)


def template_of(model: str | Path) -> ProcessorTemplate:
    """The chat template of a model, for ``FlowDataModule(template=...)``.

    Args:
        model: the model's name or folder.

    Raises:
        ValueError: it has none, or how it writes images is not known here.
    """
    return _template(model, _tokenizer(model), None)


_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Of a processor, beside those of its tokenizer."""


def copy_processor(model: str | Path, folder: Path) -> None:
    """Writes what a model reads into the folder of another that reads alike: tokenizer, template, image processor.

    Files are copied as they are, since most processors cannot be built without torchvision, for their videos.

    Args:
        model: the model's name or folder.
        folder: to write into.

    Raises:
        ValueError: the model has no tokenizer.
    """
    from transformers.utils import cached_file

    _tokenizer(model).save_pretrained(folder)
    for name in _FILES:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copy(found, folder / name)


def _tokenizer(model: str | Path) -> Any:
    refuse_missing_library()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model} has no tokenizer that transformers can open. Name a folder that has one, as QwenVLM(..., "
            "processor=FOLDER), or give the data module all of it: FlowDataModule(tokenizer=..., template=..., "
            "images=...)."
        ) from error


def _template(model: str | Path, tokenizer: Any, tiles: Tiles | None) -> ProcessorTemplate:
    config = read_config(model)
    if config.model_type not in FAMILIES:
        return _own(model, config, tokenizer).template
    template, settings = _chat_template(model, config, tokenizer)
    words = image_words(config, tokenizer, settings)
    if words.tiled and tiles is None:
        images = images_of(model)
        tiles = images.tiles_of if isinstance(images, HuggingFaceImages) else None
    return ProcessorTemplate(tokenizer, template, words, tiles)


def _chat_template(model: str | Path, config: Any, tokenizer: Any) -> tuple[str, dict[str, Any]]:
    """The chat template of a model, and the settings of its processor."""
    from transformers import ProcessorMixin

    # Its settings alone: most processors cannot be built without torchvision, which only their videos need.
    settings: dict[str, Any] = {}
    with suppress(OSError):  # a model whose processor has no file of its own
        settings, _ = ProcessorMixin.get_processor_dict(model)
    template = settings.get("chat_template") or tokenizer.chat_template
    template = template["default"] if isinstance(template, dict) else template
    if template is None and config.model_type == "paligemma":
        template = _PALIGEMMA_TEMPLATE
    if template is None:
        raise ValueError(
            f"{model} has no chat template. Say how conversations are written: "
            "FlowDataModule(template=ChatTemplate(...))."
        )
    return template, settings
