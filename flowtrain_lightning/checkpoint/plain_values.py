"""What of a checkpoint is plain enough to lie in its index as JSON, and comes back from there as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MOST_BYTES = 1 << 16
"""Larger tensors would make the index long; Lightning keeps single numbers, such as the best score."""


def is_plain(value: Any) -> bool:
    """Whether a value is made of what ranks can also tell each other, and of no subclass of it.

    ``collections.Counter``, for one, would come back as a dictionary.
    """
    kind = type(value)
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if kind is Tensor:
        is_array = value.layout == torch.strided and not value.is_quantized and not value.requires_grad
        return is_array and value.nbytes <= _MOST_BYTES
    return value is None or kind in (bool, int, float, str, type(Path()))
