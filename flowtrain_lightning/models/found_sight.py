"""Finds which tokens of a family's decoder see which, by trying each way on a twin beside the model's own forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from flowtrain_lightning.models.family_traits import Sight, Traits, all_seen, decoder_of, token_kinds, whole_of
from flowtrain_lightning.models.own_merge import own_merge, pack_decoder
from flowtrain_lightning.models.own_positions import positions_of_rows
from flowtrain_lightning.models.published_config import image_ends, image_token_id
from flowtrain_lightning.models.twin_pictures import features_of
from flowtrain_lightning.models.twin_samples import TwinSample, packed

_EQUAL = 1e-6


@torch.no_grad()
def sight_of(model: Any, config: Any, traits: Traits, samples: Sequence[TwinSample]) -> Sight:
    """The first way in which packed samples have the hidden states that each has alone; else the nearest.

    Args:
        model: a twin, with attention of its own.
        config: its config.
        traits: what else is known of it.
        samples: some longer than its windows.
    """
    expected = torch.cat([own_hidden(model, sample) for sample in samples])
    errors: dict[Sight, float] = {}
    sights: tuple[Sight, ...] = get_args(Sight)
    for sight in sights:
        try:
            found = _packed_hidden(model, config, replace(traits, sight=sight), samples)
        except Exception:  # such as packed attention that meets a window, or a mask that a layer knows nothing of
            continue
        errors[sight] = float((found - expected).abs().max() / expected.abs().max())
        if errors[sight] <= _EQUAL:
            return sight
    return min(errors, key=lambda sight: errors[sight], default="packed")


def own_hidden(model: Any, sample: TwinSample) -> Tensor:
    """``[tokens, width]`` hidden states of one sample by the model's own forward, from its pictures on."""
    batch = sample.batch
    kinds = token_kinds(model, batch.tokens, batch.media_positions.get("image")) | all_seen(model, batch.tokens)
    given = {"input_ids": batch.tokens[None], "use_cache": False, **kinds, **sample.arguments}
    hidden: Tensor = whole_of(model)(**given).last_hidden_state[0]
    return hidden


def _packed_hidden(model: Any, config: Any, traits: Traits, samples: Sequence[TwinSample]) -> Tensor:
    tried = copy.deepcopy(model)
    pack_decoder(decoder_of(tried), traits.sight)
    media = [picture for sample in samples for picture in sample.pictures]
    pictures = [each for each in media if each.media.modality == "image"]
    heard = [features_of(whole_of(tried), each)[0] for each in media if each.media.modality == "audio"]
    outputs = [features_of(whole_of(tried), each) for each in pictures]
    levels = [torch.cat(level) for level in zip(*outputs, strict=True)]
    offsets = None
    if traits.rotary:
        token, ends = image_token_id(config), image_ends(config)
        offsets = torch.cat(
            [positions_of_rows(whole_of(tried), each.arguments, each.media.rows, token, ends) for each in pictures]
        )
    sounds = torch.cat(heard) if heard else None
    arguments = own_merge(tried, traits, packed(samples), levels, offsets, sounds)
    hidden: Tensor = decoder_of(tried)(**arguments).last_hidden_state
    return hidden[0]
