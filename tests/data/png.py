"""Writes PNG files of every kind that the format knows, also what Pillow does not write, and says what they show."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, COLOUR: 3, PALETTE: 1, GREY_ALPHA: 2, COLOUR_ALPHA: 4}
DEPTHS = {GREY: (1, 2, 4, 8, 16), COLOUR: (8, 16), PALETTE: (1, 2, 4, 8), GREY_ALPHA: (8, 16), COLOUR_ALPHA: (8, 16)}
"""Type of colour -> bits of a number, by the format."""

PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Of an interlaced file (Adam7): column and row at which a pass begins, and its steps."""

Numbers = NDArray[np.int64]
Shares = NDArray[np.float64]
Chunk = tuple[bytes, bytes]


def drawn_png(chance: random.Random) -> tuple[bytes, Shares]:
    """A file of a kind drawn by chance, and ``[height, width, 3]`` what a person sees, 0 to 255."""
    kind = chance.choice(list(CHANNELS))
    depth = chance.choice(DEPTHS[kind])
    shape = chance.randint(1, 12), chance.randint(1, 12)
    draw = np.random.default_rng(chance.randrange(1 << 30))
    numbers = draw.integers(0, 1 << depth, (*shape, CHANNELS[kind]))
    if chance.random() < 0.5:  # few colours, so that one of them is often the transparent one
        numbers = draw.integers(0, 1 << depth, (3, CHANNELS[kind]))[draw.integers(0, 3, shape)]
    if kind == PALETTE:
        chunks, seen, opacity = _by_palette(numbers[:, :, 0], depth, draw)
    else:
        chunks, seen, opacity = _by_shares(numbers, kind, depth, draw)
    content = png_of(numbers, kind, depth, chunks, interlaced=chance.random() < 0.3)
    return content, seen * opacity[:, :, None] + 255 * (1 - opacity[:, :, None])


def png_of(numbers: Numbers, kind: int, depth: int, chunks: Sequence[Chunk], *, interlaced: bool = False) -> bytes:
    """A file.

    Args:
        numbers: ``[height, width, channels]`` from 0 on, of so many bits.
        kind: its type of colour.
        depth: bits of a number.
        chunks: that stand before the pixels.
        interlaced: by Adam7.
    """
    header = struct.pack(">IIBBBBB", numbers.shape[1], numbers.shape[0], depth, kind, 0, 0, interlaced)
    body = zlib.compress(b"".join(_rows(numbers, depth, interlaced)))
    parts = [(b"IHDR", header), *chunks, (b"IDAT", body[:20]), (b"IDAT", body[20:]), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in parts)


def _by_palette(numbers: Numbers, depth: int, draw: np.random.Generator) -> tuple[list[Chunk], Shares, Shares]:
    """Chunks before the pixels, what is seen of them, and how little of what lies behind them."""
    palette = draw.integers(0, 256, (1 << depth, 3))
    alpha = draw.integers(0, 256, draw.choice((0, 1, 1 << depth)))
    chunks = [(b"PLTE", palette.astype(np.uint8).tobytes())]
    if len(alpha):
        chunks.append((b"tRNS", alpha.astype(np.uint8).tobytes()))
    opacity = np.append(alpha, np.full((1 << depth) - len(alpha), 255)) / 255
    return chunks, palette[numbers].astype(np.float64), opacity[numbers]


def _by_shares(
    numbers: Numbers, kind: int, depth: int, draw: np.random.Generator
) -> tuple[list[Chunk], Shares, Shares]:
    """The same where pixels are shares of white, of colours, and perhaps of opacity."""
    shares = numbers / ((1 << depth) - 1)
    is_colour, has_alpha = kind in (COLOUR, COLOUR_ALPHA), kind in (GREY_ALPHA, COLOUR_ALPHA)
    seen = np.broadcast_to(255 * shares[:, :, : 3 if is_colour else 1], (*numbers.shape[:2], 3))
    if has_alpha or draw.random() < 0.6:
        return [], seen, shares[:, :, -1] if has_alpha else np.ones(numbers.shape[:2])
    clear = draw.choice(numbers.reshape(-1, numbers.shape[2]))
    return [(b"tRNS", struct.pack(f">{len(clear)}H", *clear))], seen, 1.0 - (numbers == clear).all(axis=2)


def _rows(numbers: Numbers, depth: int, interlaced: bool) -> Iterator[bytes]:
    """The rows of the file, each after the number of its filter (none)."""
    for x, y, across, down in PASSES if interlaced else ((0, 0, 1, 1),):
        for row in numbers[y::down, x::across]:
            if len(row):
                bits = (row.reshape(-1, 1) >> np.arange(depth - 1, -1, -1)) & 1
                yield b"\0" + np.packbits(bits.astype(np.uint8).reshape(-1)).tobytes()


def chunk(kind: bytes, body: bytes) -> bytes:
    """A part of a PNG file, with its length and its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
