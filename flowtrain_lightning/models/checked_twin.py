"""A twin of the same class and settings, which the packing check runs in place of a Hugging Face model's weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowtrain_lightning.models.built_twin import twin_of
from flowtrain_lightning.models.published_config import read_config
from flowtrain_lightning.models.trained_weights import add_adapters
from flowtrain_lightning.models.twin_samples import twin_samples
from flowtrain_lightning.packing_check.findings import Finding
from flowtrain_lightning.packing_check.samples import CheckedSamples, LoadedSample
from flowtrain_lightning.packing_check.twins import CheckedTwin

_OF_THE_MODEL_ITSELF = ("model", "processor", "generation", "min_pixels", "max_pixels")
"""Settings that say where weights and words come from, of which a twin has neither."""


def settings_of(module: Any) -> dict[str, Any]:
    """Further settings of a twin of a `HuggingFaceVLM`."""
    return {name: value for name, value in module.hparams.items() if name not in _OF_THE_MODEL_ITSELF}


def fitting(settings: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Settings without what they say of layers by numbers that a twin does not have.

    Where adapters are for such layers alone, there are none: the twin then shows what they would lie beside.

    Args:
        settings: arguments of a `HuggingFaceVLM`.
        model: the twin's, of ``transformers``.
    """
    frozen, adapters = settings.get("frozen", ()), settings.get("adapters")
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    named = [path for path in ([frozen] if isinstance(frozen, str) else frozen) if path in known]
    if adapters is None:
        return {**settings, "frozen": named}
    of_all_layers = {**adapters, "layers_to_transform": None, "layers_pattern": None}
    fits = (each for each in (adapters, of_all_layers) if _has_modules_for(each, model))
    return {**settings, "frozen": named, "adapters": next(fits, None)}


def _has_modules_for(adapters: Mapping[str, Any], model: Any) -> bool:
    try:
        add_adapters(copy.deepcopy(model), adapters)
    except (ValueError, TypeError):  # they name no module of it, or have no such setting
        return False
    return True


def checked_twin(module: Any, findings: tuple[Finding, ...] = ()) -> CheckedTwin | None:
    """A twin of a module, and samples for it; None where its family or its settings fit no smaller model.

    Args:
        module: a `HuggingFaceVLM`.
        findings: what is known to be wrong with it.
    """
    try:
        twin = twin_of(read_config(module.hparams["model"]))
        small = type(module)(twin.config, **fitting(settings_of(module), twin.model))
    except Exception:  # such as of a part that is named by the number of a layer; the module itself can be checked
        return None
    samples = [
        LoadedSample(
            number,
            sample.sequence,
            tuple(picture.media for picture in sample.pictures),
            np.asarray([picture.media.modality for picture in sample.pictures], dtype=np.str_),
        )
        for number, sample in enumerate(twin_samples(twin.config, twin.pictures))
    ]
    return CheckedTwin(small, CheckedSamples(tuple(samples)), findings)
