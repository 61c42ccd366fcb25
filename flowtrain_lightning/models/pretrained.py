"""A pretrained model and all that its data need, from one name or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from flowtrain_lightning.models.any_family import AnyVLM
from flowtrain_lightning.models.gemma import GemmaVLM
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.internvl import InternVLM
from flowtrain_lightning.models.llava import LlavaVLM
from flowtrain_lightning.models.onevision import OnevisionVLM
from flowtrain_lightning.models.paligemma import PaliGemmaVLM
from flowtrain_lightning.models.published_config import read_settings
from flowtrain_lightning.models.qwen import QwenVLM
from flowtrain_lightning.models.smolvlm import SmolVLM

TRAINED: list[type[HuggingFaceVLM]] = [
    QwenVLM,
    LlavaVLM,
    OnevisionVLM,
    InternVLM,
    SmolVLM,
    GemmaVLM,
    PaliGemmaVLM,
]
"""Classes that train some families each, in the order in which they are asked."""

_Kind = TypeVar("_Kind", bound=HuggingFaceVLM)


def from_pretrained(model: str | Path, **settings: Any) -> HuggingFaceVLM:
    """A model of Hugging Face that trains, with its own tokenizer, chat template, image and video processor.

    ``Trainer.fit`` takes it as it is. A `FlowDataModule` that is trained with it and names no tokenizer, template,
    images or videos takes those that the module has under these names.

    Args:
        model: the model's name or folder.
        settings: arguments of the `HuggingFaceVLM` that trains it, such as ``lr`` or ``frozen``. ``recompute`` may be
            called ``gradient_checkpointing``, as in ``transformers``.

    Raises:
        ImportError: transformers is not installed.
        TypeError: it is no name or folder, or a setting is not one of that `HuggingFaceVLM`.
        ValueError: there is no such model, no module here trains its family, or its files lack something.
    """
    if not isinstance(model, str | Path):
        raise TypeError(
            f"from_pretrained takes the name or folder of a model, but got a {type(model).__name__}. A model in memory "
            "is saved first, model.save_pretrained(folder); of a config alone a class of flow.models is made, such as "
            "QwenVLM(config)."
        )
    if "recompute" not in settings and "gradient_checkpointing" in settings:
        settings["recompute"] = settings.pop("gradient_checkpointing")
    module = module_class(read_settings(model)["model_type"])(model, **settings)
    if module.processor is not None:
        module.processor.read()
    return module


def register(kind: type[_Kind]) -> type[_Kind]:
    """Lets `from_pretrained` load the ``families`` of a class of yours by it, before any class of this package.

    As a decorator, ``@flow.models.register``, or called with the class.

    Args:
        kind: a `HuggingFaceVLM` that names its ``families``.

    Raises:
        TypeError: it is none, or names no families.
    """
    if not (isinstance(kind, type) and issubclass(kind, HuggingFaceVLM) and kind.families):
        raise TypeError(
            f"register takes a class of models, but got {kind!r}. Give it a subclass of HuggingFaceVLM, AnyVLM or "
            'another of flow.models that names the model_type of what it trains, such as families = ("idefics3",).'
        )
    TRAINED.insert(0, kind)
    return kind


def module_class(family: str) -> type[HuggingFaceVLM]:
    """The class that trains models of a family; of one without a class of its own, the one that takes any.

    Args:
        family: the ``model_type`` of their config.
    """
    return next((kind for kind in TRAINED if family in kind.families), AnyVLM)
