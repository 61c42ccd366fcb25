"""Describes a certified family for planning: dimensions by its config, weights counted on its own classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.allocator import ModuleDescription, PlanningError, describe_dimensions
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.module_parts import Embedding
from flowtrain_lightning.models.built_twin import twin_of
from flowtrain_lightning.models.kept_certificates import certificate_of
from flowtrain_lightning.models.pretrained import module_class
from flowtrain_lightning.models.published_config import read_config
from flowtrain_lightning.parallel.halves import role_of

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "depth", "num_layers"),
    "hidden": ("embed_dim", "hidden_size"),
    "feed_forward": ("intermediate_size", "mlp_dim"),
    "heads": ("num_attention_heads", "num_heads"),
}
_OF_TEXT: Mapping[str, tuple[str, ...]] = {
    **_NAMES,
    "hidden": ("hidden_size",),
    "key_value_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "vocabulary": ("vocab_size",),
}
_OF_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "count": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "moe_k", "top_k_experts"),
    "feed_forward": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
}
_OPTIONAL = ("key_value_heads", "head_size")


def described(config: Mapping[str, Any], name: str) -> ModuleDescription:
    """The module that a config of a certified family describes.

    Sizes that planning knows no part for, as of a scan or a resampler, count as weights without products of matrices.

    Args:
        config: what ``config.json`` holds.
        name: what to call it.

    Raises:
        PlanningError: the family has no certificate, or its config names no dimensions by the usual names.
    """
    made = read_config(config)
    found = certificate_of(made, module_class(made.model_type))
    if not found.trains:
        raise PlanningError(f"{found.sentence} Give the module's dimensions instead (see docs/planning.md).")
    weights = counted(made)
    text, vision = made.get_text_config().to_dict(), made.vision_config.to_dict()
    reader = {**_dimensions(text, _OF_TEXT), "tied": bool(made.tie_word_embeddings)}
    if any(text.get(each) for each in _OF_EXPERTS["count"]):
        reader["experts"] = _dimensions(text, _OF_EXPERTS)
    tower = {**_tower(vision), **_merging(made)}
    both = [
        describe_dimensions({"name": name, "backbone": reader, "encoders": {"image": {**tower, "gated": gated}}})
        for gated in (False, True)
    ]
    nearest = min(both, key=lambda each: abs(each.roles["encoder"].parameters - weights["encoder"]))
    halves = {role: _completed(half, weights[role], role, name) for role, half in nearest.roles.items()}
    return ModuleDescription(name, {"image": halves["encoder"]}, halves["backbone"])


def counted(config: Any) -> dict[str, int]:
    """Role -> weights of its half, of a model that is built without memory for them.

    Args:
        config: of ``transformers``.
    """
    module = module_class(config.model_type)(config)
    with torch.device("meta"):
        module.configure_model()
    found = dict.fromkeys(module.halves, 0)
    for path, weight in module.named_parameters():
        found[role_of(path, module.halves) or "backbone"] += weight.numel()
    return found


def _dimensions(config: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dimension, known in names.items():
        values = (config.get(each) for each in known)
        first = next((value[0] if isinstance(value, list) else value for value in values if value), None)
        if first is None and dimension not in _OPTIONAL:
            raise PlanningError(
                f"The config of {config.get('model_type')!r} names no {' or '.join(known)}. Give the module's "
                "dimensions instead (see docs/planning.md)."
            )
        found[dimension] = first
    return found


def _tower(vision: Mapping[str, Any]) -> dict[str, Any]:
    ratio = vision.get("mlp_ratio")
    width = vision.get("embed_dim") or vision.get("hidden_size")
    inner = {"intermediate_size": int(width * ratio)} if width and ratio and not vision.get("intermediate_size") else {}
    patch = vision.get("patch_size") or 14
    return {
        **_dimensions({**vision, **inner}, _NAMES),
        "patch": patch[0] if isinstance(patch, list | tuple) else patch,
        "frames": int(vision.get("temporal_patch_size") or 1),
    }


def _merging(config: Any) -> dict[str, int]:
    """Patches along a side of a square that becomes one row of features, seen on a small model of the family."""
    twin = twin_of(config)
    vision, picture = twin.config.vision_config, twin.pictures[0]
    side = vision.patch_size[0] if isinstance(vision.patch_size, list | tuple) else vision.patch_size
    numbers = sum(value.numel() for value in picture.arguments.values() if _is_float(value))
    patches = numbers / (3 * side**2 * int(getattr(vision, "temporal_patch_size", 1) or 1))
    return {"merge": max(1, round(math.sqrt(patches / picture.media.rows)))}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _completed(half: Half, weights: int, role: str, name: str) -> Half:
    """A half with as many weights as its model has."""
    missing = weights - half.parameters
    if missing < -0.02 * weights:
        raise PlanningError(
            f"{name} has {weights / 1e6:.0f} million weights in its {role}, but its config describes "
            f"{half.parameters / 1e6:.0f} million. Give the module's dimensions instead (see docs/planning.md)."
        )
    return replace(half, parts=(Embedding(max(missing, 0), 1), *half.parts)) if missing > 0 else half
