"""Positions of M-RoPE by the model's own rule, as offsets that are known of an image without its sequence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def positions_of_rows(whole: Any, arguments: Mapping[str, Any], rows: int, token: int, ends: tuple[int, ...]) -> Tensor:
    """Offsets of an image's rows of features from plain counting, as in ``media_offsets``.

    Args:
        whole: has ``get_rope_index``.
        arguments: what its encoder takes of the image.
        rows: of features.
        token: stands for a row of features.
        ends: what stands before and behind an image, where the model looks for that; else empty.

    Returns:
        ``[rows, 4]`` int64: offsets in time, height and width, and, at the last row, how far plain counting has run
        ahead behind it (else 0).
    """
    before, behind = (0, *ends[:1]), (*ends[1:], 0, 0)
    tokens = torch.tensor([*before, *[token] * rows, *behind])
    known = inspect.signature(whole.get_rope_index).parameters
    given: dict[str, Any] = {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None]}
    given |= {"mm_token_type_ids": (tokens == token).int()[None]}
    given |= {name: value for name, value in arguments.items() if not value.is_floating_point()}
    positions, _ = whole.get_rope_index(**{name: value for name, value in given.items() if name in known})
    positions = positions[-3:, 0].long()
    begin = len(before)
    plain = torch.arange(begin, begin + rows)
    ahead = torch.zeros(rows, dtype=torch.int64)
    last = len(tokens) - 1
    ahead[-1] = last - positions[0, last]
    return torch.cat([positions[:, begin : begin + rows] - plain, ahead[None]]).T.contiguous()
