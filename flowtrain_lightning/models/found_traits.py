"""Runs a twin of a family once, to find out what sets it apart."""

from __future__ import annotations

import inspect
import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from flowtrain_lightning.models.built_twin import Twin, twin_of
from flowtrain_lightning.models.encoder_inputs import Arguments, joined, tile_dimension
from flowtrain_lightning.models.family_traits import (
    Traits,
    as_encoder_output,
    encoders_of,
    form_of,
    halves_of,
    rows_of,
    whole_of,
)
from flowtrain_lightning.models.found_sight import sight_of
from flowtrain_lightning.models.published_config import image_token_id
from flowtrain_lightning.models.twin_pictures import features_of
from flowtrain_lightning.models.twin_samples import twin_samples
from flowtrain_lightning.models.untrainable import told_as
from flowtrain_lightning.packing_check.dispatch_modes import InFloat64

_EQUAL = 1e-9


def traits_of(config: Any) -> Traits:
    """Finds the traits of a config's family.

    Args:
        config: of ``transformers``, of any size.

    Raises:
        UntrainableError: it cannot be trained in halves; says why.
    """
    return _traits(cast(Hashable, type(config)), json.dumps(config.to_dict(), sort_keys=True, default=str))


@lru_cache(16)
def _traits(kind: Any, settings: str) -> Traits:
    given = {name: value for name, value in json.loads(settings).items() if name != "model_type"}
    twin = twin_of(kind(**given))
    with torch.device("cpu"), torch.enable_grad(), InFloat64():  # type: ignore[no-untyped-call]
        return _of_twin(twin)


def _of_twin(twin: Twin) -> Traits:
    model, config = twin.model, twin.config
    pictures = [picture for picture in twin.pictures if picture.media.modality == "image"]
    clips = [picture for picture in twin.pictures if picture.media.modality == "audio"]
    whole = whole_of(model)
    names = tuple(pictures[0].arguments)
    outputs = [whole.get_image_features(**picture.arguments, return_dict=True) for picture in pictures]
    form = form_of(outputs[0])
    levels = [rows_of(output) for output in outputs]
    of_encoder = _reached(model, [each.pow(2).sum() for each in levels[0]])
    of_ear: set[str] = set()
    for clip in clips:
        of_ear |= _reached(model, [each.pow(2).sum() for each in features_of(whole, clip)])
    with told_as("Its forward does not run on rows of features alone, which are all that goes from half to half"):
        of_backbone = _reached(model, [_decoded(model, config, [each.detach() for each in levels[0]], form)])
    halves, loose = halves_of(model, of_encoder | of_ear, of_backbone)
    if clips:
        halves = encoders_of(model, halves, of_encoder, of_ear)
    traits = Traits(
        halves=halves,
        loose=tuple(loose),
        form=form,
        names=names,
        made_up=twin.made_up,
        rotary=hasattr(whole, "get_rope_index"),
        together=_together(whole, [picture.arguments for picture in pictures], levels),
        apart=_apart(whole, [picture.arguments for picture in pictures], levels),
        sight="packed",
        hears=bool(clips),
    )
    return replace(traits, sight=sight_of(model, config, traits, twin_samples(config, twin.pictures)))


def _reached(model: Any, losses: Sequence[Tensor]) -> set[str]:
    """Names of the parameters that a backward reaches."""
    model.zero_grad(set_to_none=True)
    torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]
    found = {name for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _decoded(model: Any, config: Any, levels: Sequence[Tensor], form: Any) -> Tensor:
    """A loss of the model's own forward with given features, of one sample."""
    whole = whole_of(model)
    known = inspect.signature(whole.forward).parameters
    token, rows = image_token_id(config), len(levels[0])
    tokens = torch.tensor([1, *[token] * rows, 2, 3])[None]
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    given["position_ids"] = torch.arange(tokens.shape[1])[None]
    if hasattr(whole, "get_rope_index"):
        given["position_ids"] = given["position_ids"].expand(3, 1, -1)
    given |= {name: (tokens == token).int() for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    hidden = whole(**given, mm_encoder_outputs={"image": as_encoder_output(levels, form)}).last_hidden_state
    scores: Tensor = model.get_output_embeddings()(hidden)
    return scores.pow(2).sum()


def _together(whole: Any, arguments: Sequence[Arguments], apart: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether images that are encoded in one call have the features that each has alone."""
    try:
        found = rows_of(whole.get_image_features(**joined(arguments), return_dict=True))
    except Exception:  # whatever a tower raises of images of unlike sizes
        return False
    return _equal(found, [torch.cat(level) for level in zip(*apart, strict=True)])


def _apart(whole: Any, arguments: Sequence[Arguments], apart: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether tiles of one image have the features that each has alone: those of all images, put into one."""
    along = tile_dimension(arguments[0]["pixel_values"])
    try:
        image = {name: torch.cat([each[name] for each in arguments], dim=along) for name in arguments[0]}
        found = rows_of(whole.get_image_features(**image, return_dict=True))
    except Exception:  # whatever a tower raises that takes no tiles
        return False
    return along >= 0 and _equal(found, [torch.cat(level) for level in zip(*apart, strict=True)])


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= _EQUAL * other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )
