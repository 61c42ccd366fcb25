"""Describes a certified family for planning by its own classes: built without memory, and seen running as a twin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ModuleDescription, PlanningError
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.module_parts import Dense, Embedding, Part
from flowtrain_lightning.models.built_twin import twin_of
from flowtrain_lightning.models.described_layers import LayerKind, described_layers, layers_of
from flowtrain_lightning.models.family_traits import rows_of, whole_of
from flowtrain_lightning.models.kept_certificates import certificate_of
from flowtrain_lightning.models.pretrained import module_class
from flowtrain_lightning.models.published_config import read_config
from flowtrain_lightning.packing_check.dispatch_modes import InFloat64
from flowtrain_lightning.parallel.halves import role_of

_NUMBERS = re.compile(r"\.\d+(?=\.|$)")
_PER_PATCH = (0.5, 2.0)
"""Vectors of a layer for each patch within which it is one of the tower, and not of a resampler behind it."""
_ROWS = ("mm_tokens_per_image", "image_seq_length")
"""Names of the number of rows of features of every picture, of which twins have `_FEWER`."""
_FEWER = 4


def described(config: Mapping[str, Any], name: str) -> ModuleDescription:
    """The module that a config of a certified family describes.

    Layers and matrices are those of its own classes. Weights that are in neither, such as tables and norms, count
    as weights without products.

    Args:
        config: what ``config.json`` holds.
        name: what to call it.

    Raises:
        PlanningError: the family has no certificate, or its layers are built in no usual way.
    """
    made = read_config(config)
    found = certificate_of(made, module_class(made.model_type))
    if not found.trains:
        raise PlanningError(f"{found.sentence} Give the module's dimensions instead (see docs/planning.md).")
    module, seen = _built(made), _seen_on_twin(made)
    if ENCODER not in module.halves:
        raise PlanningError(
            f"{type(module.model).__name__} has an encoder for each modality, which is not planned from its config "
            "yet; measure it: flowtrain profile."
        )
    encoder = _half(module, ENCODER, seen)
    result = seen.levels * made.get_text_config().hidden_size, seen.features
    encoder = replace(encoder, handed_over=result, perceptrons_only=True)
    return ModuleDescription(name, {"image": encoder}, _half(module, BACKBONE, None))


def counted(config: Any) -> dict[str, int]:
    """Role -> weights of its half, of a model that is built without memory for them.

    Args:
        config: of ``transformers``.
    """
    module = _built(config)
    return {role: _weights(module, role) for role in module.halves}


def _built(config: Any) -> Any:
    module = module_class(config.model_type)(config)
    with torch.device("meta"):
        module.configure_model()
    return module


def _weights(module: Any, role: str) -> int:
    of_encoder = role == ENCODER
    return sum(
        weight.numel()
        for path, weight in module.named_parameters()
        if (role_of(path, module.halves) == ENCODER) == of_encoder
    )


@dataclass(frozen=True)
class _Seen:
    """A twin's encoder at one picture.

    Attributes:
        rows: module, numbers in its path left out -> vectors of its result per patch, in the order of calls.
        features: rows of features per patch.
        levels: tensors of features.
    """

    rows: Mapping[str, float]
    features: float
    levels: int

    def of(self, path: str) -> float:
        """Vectors per patch of a matrix, or the mean of the matrices below a path; 0 where none is used."""
        pattern = _pattern(path)
        found = [rows for name, rows in self.rows.items() if name == pattern or name.startswith(f"{pattern}.")]
        return sum(found) / len(found) if found else 0.0

    def order(self, path: str) -> int:
        """Comes earlier where a path is called earlier."""
        pattern, known = _pattern(path), list(self.rows)
        return next((n for n, name in enumerate(known) if name == pattern or name.startswith(f"{pattern}.")), -1)


def _seen_on_twin(config: Any) -> _Seen:
    twin = twin_of(config)
    whole, picture = whole_of(twin.model), twin.pictures[0]
    vectors: dict[str, float] = {}

    def note(path: str, matrix: Any, _: Any, result: Any) -> None:
        vectors[path] = vectors.get(path, 0.0) + result.numel() / _shape(matrix)[1]

    handles = [
        part.register_forward_hook(partial(note, f"model.{path}"))
        for path, part in twin.model.named_modules()
        if _is_matrix(part)
    ]
    with torch.device("cpu"), torch.no_grad(), InFloat64():  # type: ignore[no-untyped-call]
        levels = rows_of(whole.get_image_features(**picture.arguments, return_dict=True))
    for handle in handles:
        handle.remove()
    patches = _patches(twin.config.vision_config, picture.arguments)
    alike: dict[str, list[float]] = {}
    for path, number in vectors.items():
        alike.setdefault(_pattern(path), []).append(number / patches)
    features = len(levels[0]) / patches
    in_truth = _features(config, len(levels[0]), patches) or features
    rows = {}
    for pattern, numbers in alike.items():
        mean = sum(numbers) / len(numbers)
        rows[pattern] = mean if _PER_PATCH[0] <= mean <= _PER_PATCH[1] else mean * in_truth / features
    return _Seen(rows, in_truth, len(levels))


def _features(config: Any, rows: int, patches: float) -> float | None:
    """Rows of features per patch of a picture of the model's own size, where a twin's smaller ones have another share.

    Args:
        config: the model's.
        rows: that a twin makes of a picture.
        patches: of that picture.
    """
    vision = config.vision_config
    size, side = (_one(getattr(vision, name, None)) for name in ("image_size", "patch_size"))
    if not size or not side:
        return None
    named = next((getattr(config, name) for name in _ROWS if isinstance(getattr(config, name, None), int)), None)
    fixed = named if rows == _FEWER else None
    if rows > _PER_PATCH[1] * patches:  # of a resampler, which makes as many of every picture
        fixed = rows
    return fixed / (size // side) ** 2 if fixed else None


def _patches(vision: Any, arguments: Mapping[str, Any]) -> float:
    """Patches that the tower is given, which may be frames of several pictures."""
    side = _one(getattr(vision, "patch_size", None)) or 14
    frames = int(getattr(vision, "temporal_patch_size", 1) or 1)
    given = (value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point())
    return sum(value.numel() for value in given) / (3 * side**2 * frames)


def _half(module: Any, role: str, seen: _Seen | None) -> Half:
    """A half by its modules: repeated layers of each kind, and every other matrix."""
    names = {part: name for name, part in module.named_modules()}
    groups: dict[LayerKind | nn.Module, list[nn.Module]] = {}
    for root in (module.get_submodule(path) for path in module.halves[role]):
        blocks = layers_of(nn.ModuleList([root]))
        inside = {part for block in blocks for part in block.modules()} - {*blocks}
        for part in root.modules():
            if part in blocks:
                groups.setdefault(LayerKind.of(part, blocks.index(part)), []).append(part)
            elif part not in inside and _is_matrix(part):
                groups[part] = [part]
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    found: list[tuple[int, Part]] = []
    for kind, alike in groups.items():
        path = names[alike[0]]
        per_token = 1.0 if seen is None else seen.of(path)
        if not per_token:  # nothing of it runs
            continue
        made: Part
        if isinstance(kind, LayerKind):
            made = described_layers(alike, kind.window, causal=seen is None)
            if not _PER_PATCH[0] <= per_token <= _PER_PATCH[1]:
                made = Dense(made.layer_parameters // made.hidden, made.hidden, per_token, copies=made.count)
        else:
            made = Dense(*_shape(kind), per_token, tied=id(kind.weight) in tables)
        found.append((0 if seen is None else seen.order(path), made))
    return _completed([made for _, made in sorted(found, key=lambda each: each[0])], _weights(module, role))


def _completed(parts: list[Part], weights: int) -> Half:
    """A half with as many weights as its model has, those that are in no layer or matrix without products."""
    missing = weights - sum(part.parameters for part in parts)
    if missing < 0 or not parts:
        raise PlanningError(
            "Layers of this model have more weights than attention and perceptrons of their sizes. Give the module's "
            "dimensions instead (see docs/planning.md)."
        )
    first = isinstance(parts[0], Dense)  # a matrix of patches, of which loading takes the size of a picture
    return Half((*parts[:first], *([Embedding(missing, 1)] if missing else []), *parts[first:]))


def _one(size: Any) -> int | None:
    found = size[0] if isinstance(size, list | tuple) and size else size
    return found if isinstance(found, int) else None


def _pattern(path: str) -> str:
    return _NUMBERS.sub(".*", path)


def _is_matrix(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _shape(matrix: Any) -> tuple[int, int]:
    outputs = matrix.out_features if isinstance(matrix, nn.Linear) else matrix.out_channels
    return matrix.weight.numel() // outputs, outputs
