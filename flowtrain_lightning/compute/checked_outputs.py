"""Checks the rows that methods of the user's return: as many as the plan promises, in tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowtrain_lightning.compute.named_losses import described
from flowtrain_lightning.data import PackedMedia


def checked_features(output: Any, media: PackedMedia, name: str) -> tuple[Tensor, ...]:
    """The features that ``encode`` returned of a batch, as a tuple.

    Args:
        output: what it returned.
        media: the batch.
        name: of the user's class.

    Raises:
        TypeError: it returned no tensors.
        ValueError: it returned another number of rows than the plan promises.
    """
    features = output if isinstance(output, tuple) else (output,)
    rows = sum(media.rows)
    for feature in features:
        if not isinstance(feature, Tensor):
            raise TypeError(
                f"{name}.encode returned {described(output)}; return a tensor with a row for each backbone token of "
                "the media, or a tuple of such tensors."
            )
        if feature.shape[0] != rows:
            raise ValueError(
                f"{name}.encode returned {feature.shape[0]} rows of features for {len(media.rows)} media items, but "
                f"their sizes promise {rows} (PackedMedia.rows). Check that the encoder merges patches as the data "
                "module's image processor says."
            )
    return features


def checked_condition(returned: tuple[Any, ...], places: int, name: str) -> tuple[Tensor, ...]:
    """The rows that ``backbone_step`` returned behind its losses.

    Args:
        returned: what stood there.
        places: of what is to be generated, among the tokens.
        name: of the user's class.

    Raises:
        TypeError: it returned no rows.
        ValueError: it returned another number of rows than there are places.
    """
    match returned:
        case (Tensor() as rows,):
            found: tuple[Tensor, ...] = (rows,)
        case ((Tensor(), *_) as several,):
            found = tuple(several)
        case _:
            raise TypeError(
                f"{name}.backbone_step returned {described(returned)} behind its loss; where a role reads rows of its "
                "outputs, return behind what `loss` returns what `condition` returns."
            )
    for rows in found:
        if rows.shape[0] != places:
            raise ValueError(
                f"{name}.condition returned {rows.shape[0]} rows for a microbatch in which images that are to be "
                f"generated have {places} places. Return a row for each of `batch.condition_positions`, in order."
            )
    return found
