"""Names for what an encoder sees: equal content, equal name, wherever it lies."""

from __future__ import annotations

import hashlib

from flowtrain_lightning.data.loaded_media import LoadedMedia, OwnMedia
from flowtrain_lightning.data.media_files import MediaError, MediaFile, VideoFile, opened

_BLOCK = 1 << 20


def content_name(item: MediaFile | VideoFile | OwnMedia, *, alone: bool) -> str:
    """A name of a media item's content: of the bytes of its file, or of what an item of one's own gives.

    Args:
        item: the media item.
        alone: its record has no other, which some models look at more closely.

    Raises:
        MediaError: it cannot be read.
    """
    if isinstance(item, OwnMedia):
        return _loaded_name(item.load())
    is_video = isinstance(item, VideoFile)
    digest = hashlib.blake2b(f"{'video' if is_video else 'image'} {alone and not is_video};".encode(), digest_size=20)
    with opened(item.file if isinstance(item, VideoFile) else item, MediaError) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _loaded_name(media: LoadedMedia) -> str:
    told = (media.pixels.dtype, media.pixels.shape, media.grid, media.rows, media.size, media.clip, media.modality)
    digest = hashlib.blake2b(repr(told).encode(), digest_size=20)
    for array in (media.pixels, media.normalisation):
        digest.update(b";" if array is None else array.tobytes())
    return digest.hexdigest()
