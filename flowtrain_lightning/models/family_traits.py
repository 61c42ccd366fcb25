"""Traits of a family, found by running a twin of it: its halves, and the forms in which it hands features on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.models.untrainable import UntrainableError

Form = Literal["rows", "tuple", "stack"]
"""Features of all images in a row; a tuple with those of each image; all images have as many."""

Sight = Literal["packed", "windows", "images", "images in windows"]
"""Tokens see those before them; or a few of these in some layers; or those of their image, too; or these in the layers
alone that see a few."""


@dataclass(frozen=True)
class Traits:
    """Traits that set a family apart, as far as training needs them.

    Attributes:
        halves: role -> paths of modules below the Hugging Face model, the decoder first; where the model hears, there
            is an encoder for each modality.
        loose: paths of parameters of the encoder that lie in no module of their half alone.
        form: of the features that the encoder hands on.
        rotary: positions follow a rule of the model's own (``get_rope_index``).
        names: what ``get_image_features`` takes of images.
        made_up: they were found with pictures in patches, not with those of an image processor.
        together: images are encoded in one call, each as if it were alone.
        apart: so are tiles of an image.
        sight: which tokens see which.
        hears: it takes clips of audio too.
    """

    halves: Mapping[str, tuple[str, ...]]
    loose: tuple[str, ...]
    form: Form
    rotary: bool
    names: tuple[str, ...]
    made_up: bool
    together: bool
    apart: bool
    sight: Sight
    hears: bool = False


def whole_of(model: Any) -> Any:
    """The part of a Hugging Face model that puts encoder and decoder together, without the head.

    Raises:
        UntrainableError: it has none.
    """
    for part in (getattr(model, "model", None), model):
        if hasattr(part, "get_image_features"):
            return part
    raise UntrainableError(
        f"{type(model).__name__} has no get_image_features, so that its encoder cannot be run apart from its decoder."
    )


def token_kinds(model: Any, tokens: Tensor, places: Tensor | None) -> dict[str, Tensor]:
    """Tokens that stand for images, by the names under which a model's own forward asks for them."""
    inside = torch.zeros_like(tokens)
    if places is not None:
        inside[places] = 1
    known = inspect.signature(whole_of(model).forward).parameters
    return {name: inside[None] for name in ("token_type_ids", "mm_token_type_ids") if name in known}


def all_seen(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """A mask of a sample without padding, for forwards that count positions in three dimensions only beside one."""
    return {"attention_mask": torch.ones_like(tokens)[None]} if hasattr(whole_of(model), "get_rope_index") else {}


def decoder_of(model: Any) -> Any:
    """The decoder: what computes hidden states of embeddings."""
    whole = whole_of(model)
    for name in ("language_model", "text_model"):
        if isinstance(getattr(whole, name, None), nn.Module):
            return getattr(whole, name)
    return model.get_decoder()


def form_of(output: Any) -> Form:
    """The form in which ``get_image_features`` hands features on."""
    pooled = output.pooler_output
    if isinstance(pooled, tuple | list):
        return "tuple"
    return "stack" if pooled.ndim > 2 else "rows"


def rows_of(output: Any) -> tuple[Tensor, ...]:
    """``[rows, width]`` the features, and as many of each level that deeper layers of the decoder add."""
    levels = getattr(output, "deepstack_features", None)
    return tuple(_flat(level) for level in (output.pooler_output, *(levels if levels is not None else ())))


def _flat(rows: Any) -> Tensor:
    if isinstance(rows, tuple | list):
        return torch.cat([each.reshape(-1, each.shape[-1]) for each in rows])
    return rows.reshape(-1, rows.shape[-1])  # type: ignore[no-any-return]


def as_encoder_output(levels: Sequence[Tensor], form: Form) -> Any:
    """What ``forward(mm_encoder_outputs={"image": ...})`` takes of rows of features, whatever images they are of."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    def formed(rows: Tensor) -> Any:
        return (rows,) if form == "tuple" else rows[None] if form == "stack" else rows

    rows, *deeper = levels
    output = BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=formed(rows))
    if deeper:
        output["deepstack_features"] = [formed(level) for level in deeper]
    return output


def encoders_of(
    model: Any, halves: Mapping[str, tuple[str, ...]], of_eye: set[str], of_ear: set[str]
) -> dict[str, tuple[str, ...]]:
    """The halves with an encoder for each modality.

    Args:
        model: of ``transformers``.
        halves: as `halves_of` gives them.
        of_eye: names of parameters that a backward through images reached.
        of_ear: names that one through audio reached.

    Raises:
        ValueError: both reached a parameter.
    """
    if both := sorted(of_eye & of_ear):
        raise ValueError(
            f"{type(model).__name__} has parameters that images and audio both use, such as {both[0]}, so that their "
            "encoders cannot train on ranks of their own."
        )
    hear = {path for path in halves[ENCODER] if any(name.startswith(f"{path}.") for name in of_ear)}
    see = tuple(path for path in halves[ENCODER] if path not in hear)
    return {f"{ENCODER}_image": see, f"{ENCODER}_audio": tuple(sorted(hear)), BACKBONE: halves[BACKBONE]}


def halves_of(model: Any, of_encoder: set[str], of_backbone: set[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The halves of a model, by which parameters a backward through each reached.

    Args:
        model: of ``transformers``.
        of_encoder: names of parameters that its encoder reached.
        of_backbone: names that its decoder and head reached.

    Returns:
        role -> paths of modules, the decoder first; and the paths of parameters of the encoder beside such modules.

    Raises:
        ValueError: both reached a parameter.
    """
    if both := sorted(of_encoder & of_backbone):
        raise ValueError(
            f"{type(model).__name__} has parameters that its encoder and its decoder both use, such as {both[0]}, so "
            "that they cannot train on ranks of their own."
        )
    named = {name: weight for name, weight in model.named_parameters() if name in of_encoder | of_backbone}
    shared = {id(weight): ENCODER if name in of_encoder else BACKBONE for name, weight in named.items()}
    found: dict[str, list[str]] = {ENCODER: [], BACKBONE: []}
    loose: list[str] = []

    def assign(path: str, module: nn.Module) -> None:
        roles = {shared.get(id(weight)) for weight in module.parameters()}
        known = roles - {None}
        if not roles:
            return
        if len(known) == 1:
            found[str(known.pop())].append(path)
            return
        if not known:  # nothing used it; beside what is frozen it harms nobody
            found[ENCODER].append(path)
            return
        for name, weight in module.named_parameters(recurse=False):
            if shared.get(id(weight)) == BACKBONE:
                raise ValueError(f"{type(model).__name__} holds {path}.{name} of its decoder beside its encoder.")
            loose.append(f"{path}.{name}" if path else name)
        for name, child in module.named_children():
            assign(f"{path}.{name}" if path else name, child)

    assign("", model)
    decoder = {id(module): name for name, module in model.named_modules()}[id(decoder_of(model))]
    if decoder not in found[BACKBONE]:
        raise ValueError(f"The decoder of {type(model).__name__}, {decoder}, has parts that only its encoder uses.")
    found[BACKBONE].sort(key=lambda path: path != decoder)
    return {role: tuple(paths) for role, paths in found.items()}, loose
