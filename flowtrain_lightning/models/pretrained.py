"""A pretrained model and all that its data need, from one name or folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain_lightning.data import ImageProcessor, Tokenizer, VideoProcessor
from flowtrain_lightning.models.gemma import GemmaVLM
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.internvl import InternVLM
from flowtrain_lightning.models.llava import LlavaVLM
from flowtrain_lightning.models.onevision import OnevisionVLM
from flowtrain_lightning.models.paligemma import PaliGemmaVLM
from flowtrain_lightning.models.processor_template import ProcessorTemplate
from flowtrain_lightning.models.qwen import QwenVLM
from flowtrain_lightning.models.smolvlm import SmolVLM

_TRAINED: tuple[type[HuggingFaceVLM], ...] = (
    QwenVLM,
    LlavaVLM,
    OnevisionVLM,
    InternVLM,
    SmolVLM,
    GemmaVLM,
    PaliGemmaVLM,
)


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model.

    Attributes:
        module: what is trained. A `FlowDataModule` that is trained with it and names no tokenizer, template, images or
            videos takes those below by itself.
        tokenizer: text to ids and back.
        template: how the model's conversations are written.
        images: what becomes of the model's images.
        videos: what becomes of its videos; None of a model that takes none.
    """

    module: HuggingFaceVLM
    tokenizer: Tokenizer
    template: ProcessorTemplate
    images: ImageProcessor
    videos: VideoProcessor | None


def from_pretrained(model: str | Path, **settings: Any) -> Pretrained:
    """A model of Hugging Face with its own tokenizer, chat template, image and video processor.

    Args:
        model: the model's name or folder.
        settings: arguments of the `HuggingFaceVLM` that trains it, such as ``lr`` or ``frozen``.

    Raises:
        ValueError: there is no such folder, no module here trains its family, or its files lack something.
    """
    from transformers import AutoConfig

    _refuse_missing_folder(model)
    module = module_class(AutoConfig.from_pretrained(model).model_type)(model, **settings)
    processor = module.processor
    assert processor is not None, "a model that has a name has a processor"
    return Pretrained(module, processor.tokenizer, processor.template, processor.images, processor.videos)


def _refuse_missing_folder(model: str | Path) -> None:
    """Refuses what can only be a folder and is not there, of which transformers says that it is no name on the Hub."""
    if (isinstance(model, Path) or model.startswith(("/", ".", "~"))) and not Path(model).is_dir():
        raise ValueError(
            f"There is no folder {model}; give the folder of a model, or its name on the Hugging Face Hub."
        )


def module_class(family: str) -> type[HuggingFaceVLM]:
    """The class that trains models of a family.

    Args:
        family: the ``model_type`` of their config.

    Raises:
        ValueError: none does.
    """
    for kind in _TRAINED:
        if family in kind.families:
            return kind
    trained = ", ".join(name for kind in _TRAINED for name in kind.families)
    raise ValueError(
        f"The model is of type {family!r}; the families that train are {trained}. For others write a HuggingFaceVLM of "
        "your own (docs/models.md)."
    )
