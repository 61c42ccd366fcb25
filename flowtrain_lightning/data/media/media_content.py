"""Names for what an encoder sees: equal content, equal name, wherever it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowtrain_lightning.data.media.loaded_media import LoadedMedia, OwnMedia
from flowtrain_lightning.data.media.media_files import (
    AudioFile,
    EncodedMedia,
    MediaError,
    NamedMedia,
    VideoFile,
    file_of,
    kind_of,
    opened,
)
from flowtrain_lightning.data.media.media_status import MediaStatus
from flowtrain_lightning.packing import IntArray

_BLOCK = 1 << 20


def content_numbers(items: Sequence[NamedMedia], status: MediaStatus, *, alone: bool) -> IntArray:
    """``[media items]`` equal numbers for equal media items, as far as that is known without reading files.

    A local file is told by its path, size and time of change, what stands in the data by its bytes; what lies behind an
    address is not told: -1.

    Args:
        items: the media items of a record.
        status: of their files.
        alone: there is one of them, which some models look at more closely.
    """
    found = zip(items, status.names, status.found.tolist(), strict=True)
    return np.array([_number(item, name, of_file, alone) for item, name, of_file in found], dtype=np.int64)


def _number(item: NamedMedia, name: str, of_file: Sequence[int], alone: bool) -> int:
    file = file_of(item)
    digest = hashlib.blake2b(f"{kind_of(item)} {alone};".encode(), digest_size=8)
    if isinstance(file, EncodedMedia):
        digest.update(file.content)
    elif name:
        path = str(file.absolute()) if isinstance(file, Path) else str(file)
        digest.update(f"{path}\0{of_file[0]}\0{of_file[1]}".encode(errors="surrogateescape"))
    else:
        return -1
    return int.from_bytes(digest.digest(), "little") >> 1  # not negative


def content_name(item: NamedMedia | OwnMedia, *, alone: bool) -> str:
    """A name of a media item's content: of the bytes of its file, or of what an item of one's own gives.

    Args:
        item: the media item.
        alone: its record has no other, which some models look at more closely.

    Raises:
        MediaError: it cannot be read.
    """
    if isinstance(item, OwnMedia):
        return _loaded_name(item.load())
    alike = isinstance(item, VideoFile | AudioFile)  # whatever else its record has
    digest = hashlib.blake2b(f"{kind_of(item)} {alone and not alike};".encode(), digest_size=20)
    with opened(file_of(item), MediaError) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _loaded_name(media: LoadedMedia) -> str:
    told = (media.pixels.dtype, media.pixels.shape, media.grid, media.rows, media.size, media.clip, media.modality)
    digest = hashlib.blake2b(repr(told).encode(), digest_size=20)
    for array in (media.pixels, media.normalisation):
        digest.update(b";" if array is None else array.tobytes())
    return digest.hexdigest()
