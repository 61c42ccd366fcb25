"""Lengths of real samples for the packing benchmark: text tokens and picture sizes under a model's picture rule."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from flowtrain_lightning.packing.offline import cost_of_media

FOLDER = Path(os.environ.get("FLOWTRAIN_DATA", Path(__file__).parents[1] / "../shared/data"))
TABLES = ("coco_captions", "msdocs_interleaved", "text_gsm8k")
ENCODER_COST = 0.09
"""Cost of an encoder patch, in the cost of a backbone token."""


@dataclass(frozen=True)
class Lengths:
    """Samples in sampler order: tokens, and encoder cost of each media item."""

    tokens: NDArray[np.int64]
    media_start: NDArray[np.int64]
    media_cost: NDArray[np.float64]

    @property
    def encoder_cost(self) -> NDArray[np.float64]:
        return cost_of_media(self.media_start, self.media_cost)


def qwen_tokens(height: float, width: float) -> int:
    """Backbone tokens of a picture under the rule of Qwen2.5-VL; it has four times as many patches."""
    factor, most, least = 28, 28 * 28 * 1280, 56 * 56
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > most:
        scale = (height * width / most) ** 0.5
        h = max(factor, int(height / scale / factor) * factor)
        w = max(factor, int(width / scale / factor) * factor)
    elif h * w < least:
        scale = (least / (height * width)) ** 0.5
        h, w = (-int(-side * scale // factor) * factor for side in (height, width))
    return h * w // (factor * factor)


def tile_tokens(height: float, width: float) -> int:
    """Backbone tokens of a picture in at most 12 tiles, as InternVL cuts it: 2 markers, else one for 4 patches."""
    most = 12
    grids = sorted(
        ((i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most), key=lambda g: g[0] * g[1]
    )
    best, nearest = (1, 1), float("inf")
    for i, j in grids:
        distance = abs(width / height - i / j)
        if distance < nearest or (distance == nearest and height * width > 0.5 * 448 * 448 * i * j):
            best, nearest = (i, j), distance
    tiles = best[0] * best[1]
    return 256 * (tiles + (tiles > 1)) + 2


def _columns(table: str) -> dict[str, list[Any]]:
    path = FOLDER / f"{table}.parquet"
    if not path.is_file():
        sys.exit(f"There is no file {path}. Set FLOWTRAIN_DATA to the folder that docs/packing.md describes.")
    columns: dict[str, list[Any]] = pyarrow.parquet.read_table(path).to_pydict()
    return columns


def load(rule: str, tables: tuple[str, ...], count: int, budget: int, seed: int = 0) -> Lengths:
    """``count`` samples of ``tables``, shuffled, and shuffled anew each time they run out; cut to ``budget``."""
    tokens: list[int] = []
    media: list[list[float]] = []
    known: dict[tuple[int, int], int] = {}
    for table in tables:
        columns = _columns(table)
        for text, heights, widths in zip(columns["text_tokens"], columns["img_h"], columns["img_w"], strict=True):
            sizes = list(zip(heights, widths, strict=True))
            for size in sizes:
                if size not in known:
                    known[size] = (qwen_tokens if rule == "qwen" else tile_tokens)(*size)
            length = text + sum(known[size] for size in sizes)
            share = min(1.0, budget / length)
            tokens.append(min(length, budget))
            media.append([ENCODER_COST * share * 4 * (known[size] - (rule != "qwen") * 2) for size in sizes])
    generator = np.random.default_rng(seed)
    rounds = -(-count // len(tokens))
    order = np.concatenate([generator.permutation(len(tokens)) for _ in range(rounds)])[:count]
    counts = np.array([len(media[sample]) for sample in order])
    return Lengths(
        np.array(tokens, dtype=np.int64)[order],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([np.asarray(media[sample], dtype=np.float64) for sample in order]),
    )
