"""A twin of the same class and settings, which the packing check runs in place of a Hugging Face model's weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowtrain_lightning.models.built_twin import twin_of
from flowtrain_lightning.models.published_config import read_config
from flowtrain_lightning.models.twin_samples import twin_samples
from flowtrain_lightning.packing_check.findings import Finding
from flowtrain_lightning.packing_check.samples import CheckedSamples, LoadedSample
from flowtrain_lightning.packing_check.twins import CheckedTwin

_OF_THE_MODEL_ITSELF = ("model", "processor", "generation", "min_pixels", "max_pixels")
"""Settings that say where weights and words come from, of which a twin has neither."""


def settings_of(module: Any) -> dict[str, Any]:
    """Further settings of a twin of a `HuggingFaceVLM`."""
    return {name: value for name, value in module.hparams.items() if name not in _OF_THE_MODEL_ITSELF}


def checked_twin(module: Any, findings: tuple[Finding, ...] = ()) -> CheckedTwin | None:
    """A twin of a module, and samples for it; None where its family or its settings fit no smaller model.

    Args:
        module: a `HuggingFaceVLM`.
        findings: what is known to be wrong with it.
    """
    try:
        twin = twin_of(read_config(module.hparams["model"]))
        small = type(module)(twin.config, **settings_of(module))
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
