"""The processor of a pretrained model: tokenizer, chat template, images and videos, from its name or folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain_lightning.data import AudioProcessor, ImageProcessor, Tokenizer, VideoProcessor, open_tokenizer
from flowtrain_lightning.models.asked_audio import own_audio
from flowtrain_lightning.models.asked_images import size_of_image
from flowtrain_lightning.models.huggingface_images import HuggingFaceImages
from flowtrain_lightning.models.image_words import FAMILIES, ImageWords, image_words
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

if TYPE_CHECKING:
    from typing_extensions import Self

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


class Processor:
    """The processor of a model, for ``FlowDataModule``. A part is built when it is first asked for.

    Args:
        model: the model's name or folder.
        min_pixels: of an image, in place of the model's own; for Qwen alone.
        max_pixels: of an image, in place of the model's own; for Qwen alone.
        family: the ``model_type`` whose words and pixels it has; empty: its own.
    """

    def __init__(
        self, model: str | Path, min_pixels: int | None = None, max_pixels: int | None = None, family: str = ""
    ) -> None:
        self._model = model
        self._bounds = min_pixels, max_pixels
        self._reads_as = family

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return open_tokenizer(self._own_tokenizer)

    @cached_property
    def template(self) -> ProcessorTemplate:
        """The template of conversations."""
        template, settings = _chat_template(self._model, self._family, self._own_tokenizer)
        if not self._is_known:
            return ProcessorTemplate(self._own_tokenizer, template, *self._asked_words)
        words = image_words(self._family, self._own_tokenizer, settings)
        tiles = self.images.tiles_of if words.tiled and isinstance(self.images, HuggingFaceImages) else None
        return ProcessorTemplate(self._own_tokenizer, template, words, tiles)

    @cached_property
    def images(self) -> ImageProcessor:
        """The processor of images."""
        if self._is_known:
            return images_of(self._model, *self._bounds)
        if self._bounds != (None, None):
            raise ValueError(
                f"The images of {self._model} are made by its own image processor, which min_pixels and max_pixels do "
                "not change; leave them out, or change the sizes in a copy of its preprocessor_config.json."
            )
        return counted_by_words(own_images(self._whole, self._config), self._asked_words[0])

    @cached_property
    def videos(self) -> VideoProcessor | None:
        """The processor of videos; None of a model that takes none."""
        return videos_of(self._model)

    @cached_property
    def audio(self) -> AudioProcessor | None:
        """The processor of audio; None of a model that does not hear."""
        return None if self._is_known else own_audio(self._model, self._config)

    def copy_to(self, folder: Path) -> None:
        """Writes what a model reads into the folder of another that reads alike, sizes of images as they are used here.

        Args:
            folder: to write into.

        Raises:
            ValueError: the model has no tokenizer.
        """
        copy_processor(self._model, folder)
        names = ("shortest_edge", "longest_edge")
        given = {name: pixels for name, pixels in zip(names, self._bounds, strict=True) if pixels is not None}
        if given:
            _set_sizes_of_images(folder, given)

    def read(self) -> Self:
        """Builds all parts, so that what cannot be read is told now.

        Raises:
            ValueError: something of it is not known here.
        """
        _ = self.tokenizer, self.images, self.template, self.videos, self.audio
        return self

    @property
    def _is_known(self) -> bool:
        """Whether the family's words and pixels are written down here; else its own processor is asked."""
        return self._family in FAMILIES

    @property
    def _family(self) -> str:
        return self._reads_as or str(self._config.model_type)

    @cached_property
    def _config(self) -> Any:
        return read_config(self._model)

    @cached_property
    def _own_tokenizer(self) -> Any:
        return _tokenizer(self._model)

    @cached_property
    def _whole(self) -> Any:
        return own_processor(self._model, self._config, self._own_tokenizer, own_image_processor(self._model))

    @cached_property
    def _asked_words(self) -> tuple[ImageWords, Tiles]:
        return own_words(self._whole, self._config, self._own_tokenizer), size_of_image


def processor_of(model: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    """All that the data module needs to know of a model. See `template_of` and `images_of`.

    Args:
        model: the model's name or folder.
        min_pixels: of an image, in place of the model's own; for Qwen alone.
        max_pixels: of an image, in place of the model's own; for Qwen alone.

    Raises:
        ValueError: something of it is not known here.
    """
    return Processor(model, min_pixels, max_pixels).read()


def template_of(model: str | Path) -> ProcessorTemplate:
    """The chat template of a model, for ``FlowDataModule(template=...)``.

    Args:
        model: the model's name or folder.

    Raises:
        ValueError: it has none, or how it writes images is not known here.
    """
    return Processor(model).template


_MEDIA_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
_FILES = ("chat_template.jinja", "chat_template.json", "processor_config.json", *_MEDIA_FILES)
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


def _set_sizes_of_images(folder: Path, size: Mapping[str, int]) -> None:
    """Changes the bounds of Qwen's images in the files of a processor; those of videos stay as they are."""
    whole, images, videos = (folder / name for name in ("processor_config.json", *_MEDIA_FILES))
    if images.is_file():
        if not videos.is_file():  # whose bounds are then read from the file of images
            shutil.copy(images, videos)
        images.write_text(json.dumps(_with_size(json.loads(images.read_text()), size), indent=2))
    if whole.is_file() and "image_processor" in (settings := json.loads(whole.read_text())):
        settings["image_processor"] = _with_size(settings["image_processor"], size)
        whole.write_text(json.dumps(settings, indent=2))


def _with_size(settings: dict[str, Any], size: Mapping[str, int]) -> dict[str, Any]:
    """Settings of an image processor with other bounds, which older files call ``min_pixels`` and ``max_pixels``."""
    older = {"shortest_edge": settings.pop("min_pixels", None), "longest_edge": settings.pop("max_pixels", None)}
    known = {name: pixels for name, pixels in older.items() if pixels is not None}
    return {**settings, "size": {**(settings.get("size") or {}), **known, **size}}


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


def _chat_template(model: str | Path, family: str, tokenizer: Any) -> tuple[str, dict[str, Any]]:
    """The chat template of a model, and the settings of its processor."""
    from transformers import ProcessorMixin

    # Its settings alone: most processors cannot be built without torchvision, which only their videos need.
    settings: dict[str, Any] = {}
    with suppress(OSError):  # a model whose processor has no file of its own
        settings, _ = ProcessorMixin.get_processor_dict(model)
    template = settings.get("chat_template") or tokenizer.chat_template
    template = template["default"] if isinstance(template, dict) else template
    if template is None and family == "paligemma":
        template = _PALIGEMMA_TEMPLATE
    if template is None:
        raise ValueError(
            f"{model} has no chat template. Say how conversations are written: "
            "FlowDataModule(template=ChatTemplate(...))."
        )
    return template, settings
