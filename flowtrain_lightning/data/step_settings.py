"""Settings of a data module that decide which samples are in a step, and how these are packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowtrain_lightning.data.stage_data import StageData

_ARGUMENTS = (
    "token_budget",
    "encoder_budget",
    "global_batch_size",
    "seed",
    "shuffle",
    "images",
    "videos",
    "audio",
    "template",
    "token_steps",
    "packing",
    "group_by",
)


def steps_rest_on(data: StageData) -> dict[str, Any]:
    """The settings beside the files, by the names of the arguments, alike on all ranks."""
    settings = {name: getattr(data, name) for name in _ARGUMENTS}
    settings["index"] = replace(data.index, cache_dir=None)  # which every node may have elsewhere
    settings |= {"tokenizer": data.tokenizer.fingerprint, "protocols": sorted(data.protocols)}
    settings["ignore_columns"] = sorted(data.ignore_columns)
    settings |= {} if data.columns is None else {"columns": data.columns}
    if "train" in data.files:
        settings |= {"weights": data.files["train"].weights, "temperature": data.files["train"].temperature}
    return settings
