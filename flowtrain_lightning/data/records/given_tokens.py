"""Samples that are tokenised already, as Hugging Face's models take them: ``input_ids`` and ``labels``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.batch import IGNORED_LABEL
from flowtrain_lightning.packing import IntArray


@dataclass(frozen=True, eq=False)
class GivenTokens:
    """Tokens that stand in the record itself.

    Attributes:
        ids: ``[tokens]`` the ids; an image is one image token, or as many as it has rows of features.
        learned: ``[tokens]`` whether the backbone learns to write each.
        media_ids: the ids that stand for media items; empty is the template's image token.
    """

    ids: IntArray
    learned: NDArray[np.bool_]
    media_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> GivenTokens:
        """Those of a record. Labels are not shifted, -100 where nothing is learned; without any, all is learned.

        Raises:
            ValueError: these are no such tokens; says why.
        """
        ids, labels = _whole_numbers(fields, "input_ids"), _whole_numbers(fields, "labels")
        if ids is None or len(ids) == 0:
            raise ValueError("'input_ids' must be a list with at least one token id")
        if (ids < 0).any():
            raise ValueError(f"'input_ids' holds {ids.min()}, which is no token id")
        mask = _whole_numbers(fields, "attention_mask")
        if mask is not None and (len(mask) != len(ids) or (mask != 1).any()):
            raise ValueError("'attention_mask' leaves tokens out; take the padding away, nothing is padded here")
        if labels is None:
            return cls(ids, np.ones(len(ids), dtype=bool))
        if len(labels) != len(ids) or ((labels != ids) & (labels != IGNORED_LABEL)).any():
            raise ValueError(
                f"'labels' must have, for each of the {len(ids)} 'input_ids', that id or {IGNORED_LABEL}; they are "
                "not shifted"
            )
        return cls(ids, labels != IGNORED_LABEL)


def _whole_numbers(fields: Mapping[str, Any], name: str) -> IntArray | None:
    values = fields.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        raise ValueError(f"{name!r} must be a list of whole numbers")
    return np.asarray(values, dtype=np.int64)
