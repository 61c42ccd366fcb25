"""A second loss of a backbone: beside the words, it tells of each place of a medium where in its sequence it is."""

from __future__ import annotations

from torch import Tensor

from flowtrain_lightning.data import PackedBatch, SampleSizes

PLACES = "places"
_PLACE_ID = 3
"""The token that stands where a row of features goes."""


def told_places(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
    """The squared errors of the first number of each place's logits, and how many places there are."""
    is_place = batch.tokens == _PLACE_ID
    errors = logits[is_place, 0] - 0.1 * batch.position_ids[is_place]
    return errors.square().sum(), len(errors)


def places_of(sizes: SampleSizes) -> dict[str, int]:
    """The number of all places of a step."""
    return {PLACES: int(sizes.media_rows.sum())}
