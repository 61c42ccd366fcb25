"""The input of ``flowtrain plan``: a module, a device and the lengths of data, from names and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowtrain_lightning.allocator import (
    Device,
    Efficiency,
    ModuleDescription,
    PlanningError,
    Workload,
    describe_config,
    describe_dimensions,
    device_from,
    named_device,
    named_model,
    typical_workload,
)
from flowtrain_lightning.allocator.hf_config import READ
from flowtrain_lightning.allocator.modelled import MOST_DEVICES
from flowtrain_lightning.cli.lengths import media_column, media_content, media_lengths, media_start, read_lengths
from flowtrain_lightning.placement.calibration import measured_efficiencies
from flowtrain_lightning.placement.profile import Profile


def read_module(name: str) -> ModuleDescription:
    """A module by its public name, from a Hugging Face ``config.json``, or from a YAML file of dimensions."""
    if Path(name).suffix == ".json":
        path = Path(name)
        folder = path.resolve().parent.name  # of a model that was downloaded all is called alike, but the folder
        name, content = folder if path.stem == "config" and folder else path.stem, _content(path)
        return _described(content, name) if _is_of_no_reader(content) else describe_config(content, name)
    if Path(name).suffix in (".yaml", ".yml"):
        return describe_dimensions({"name": Path(name).stem, **_content(Path(name))})
    return named_model(name)


def _is_of_no_reader(config: Mapping[str, Any]) -> bool:
    """Whether only the classes of ``transformers`` can say what a config describes."""
    return (
        str(config.get("model_type")) not in READ
        and "vision_config" in config
        and find_spec("transformers") is not None
    )


def _described(config: Mapping[str, Any], name: str) -> ModuleDescription:
    from flowtrain_lightning.models.described import described

    try:
        return described(config, name)
    except ValueError as error:  # of what is no config of transformers
        raise PlanningError(str(error)) from error


def read_device(name: str) -> Device:
    """A known device, or one that a YAML file describes."""
    if Path(name).suffix in (".yaml", ".yml"):
        return device_from({"name": Path(name).stem, **_content(Path(name))})
    return named_device(name)


def devices_per_node(devices: int, device: Device, nodes: int | None) -> int:
    """Devices of each node, as usual for the device where no number of nodes is given.

    Raises:
        PlanningError: nodes would not be equal, or there is no device.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise PlanningError(f"There are {devices:,} devices; plans are made for 1 to {MOST_DEVICES:,}.")
    if nodes is None:
        if devices > device.per_node and devices % device.per_node:
            raise PlanningError(
                f"{devices} devices cannot be divided into nodes of {device.per_node}, as is usual for {device.name}; "
                "say with --nodes how many nodes there are."
            )
        return device.per_node
    if nodes < 1 or devices % nodes:
        raise PlanningError(f"{devices} devices cannot be divided into {nodes} equal nodes.")
    return devices // nodes


def read_efficiencies(
    profile: Profile | None, module: ModuleDescription, workload: Workload, device: Device, precision: str
) -> Mapping[str, Efficiency] | None:
    """Role -> the shares of the device's peaks that a profile found, or None without a profile."""
    if profile is None:
        return None
    return measured_efficiencies(profile, module.with_projectors_apart(workload.encoder_tokens), device, precision)


def read_workload(path: Path | None, module: ModuleDescription, settings: Mapping[str, Any]) -> Workload:
    """Lengths from a Parquet file, or typical ones where there is none.

    The file has an entry per sample: ``tokens``, and for every modality a list of its media items' encoder tokens
    (patches, frames): ``image_tokens``, ``audio_tokens`` …, and ``generated_tokens`` where it generates;
    ``media_tokens`` where it takes media of one modality. Equal
    numbers in ``image_content`` … tell media items that are the same, of which a step encodes one. Without a
    ``token_budget`` a microbatch takes as many tokens as usual, or as the longest sample has.

    Raises:
        UsageError: the file cannot be read, or lacks a column.
    """
    any_length, usual = settings["token_budget"] is None, Workload.token_budget
    if path is None:
        return typical_workload(module, **{**settings, "token_budget": usual} if any_length else settings)
    tokens, table = read_lengths(path)
    if any_length:
        settings = {**settings, "token_budget": max(usual, int(tokens.max(initial=0)))}
    media, content = {}, {}
    for modality in module.modalities:
        others = ("media_tokens",) if len(module.modalities) == 1 else ()
        column = media_column(table, modality, path, *others)
        media[modality] = media_lengths(table[column], path, column)
        found = media_content(table, column.removesuffix("_tokens"), media_start(table[column]), path)
        if found is not None:
            content[modality] = found
    return Workload(tokens, media, content=content, **settings)


def _content(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PlanningError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise PlanningError(f"{path} must hold names with values, but holds {type(content).__name__}.")
    return content
