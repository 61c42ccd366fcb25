"""Opens media items, from files or bytes in the data; what is wrong is said in a sentence."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from flowtrain_lightning.data.data_path import PROTOCOLS, data_path, is_local, protocols_of
from flowtrain_lightning.data.media.loaded_media import OwnMedia


class MediaError(ValueError):
    """A media item that cannot be used; the message says why, without naming the record."""


@dataclass(frozen=True)
class EncodedMedia:
    """A media item that stands in the data itself.

    Attributes:
        name: for messages.
        content: the bytes of an image, video or audio file.
    """

    name: str
    content: bytes = field(repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class MediaAddress:
    """A media item at an address that a record names.

    Attributes:
        address: such as ``s3://bucket/cat.png``.
        named: kinds of addresses that the user allows beside `PROTOCOLS`.
    """

    address: str
    named: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.address

    def path(self) -> Path:
        """The place of the item.

        Raises:
            MediaError: records may not name addresses of this kind.
        """
        kinds = protocols_of(self.address)
        refused = next((kind for kind in kinds if kind not in PROTOCOLS | self.named), None)
        if refused is not None:
            known = ", ".join(sorted(PROTOCOLS | self.named))
            raise MediaError(
                f"records may not name addresses of the kind {refused!r:.40}, only of {known}, lest a record "
                "decides what this machine opens and waits for; save it as a file and name its path or, where you "
                f"trust the data, allow the kind: FlowDataModule(protocols=[{refused!r:.40}])"
            )
        first, rest = self.address.split("://", 1)
        found = data_path(f"{first.lower()}://{rest}")
        in_a_folder = kinds in (["file"], ["local"])
        return Path(found.path) if in_a_folder else found  # type: ignore[attr-defined]


_EMPTY = "it is empty: there is not one byte in it"

MediaFile = Path | EncodedMedia | MediaAddress
"""The place of a media item: a file, its bytes, or an address."""


@dataclass(frozen=True)
class VideoFile:
    """A video that a record names or holds.

    Attributes:
        file: where it is.
    """

    file: MediaFile

    def __str__(self) -> str:
        return str(self.file)


@dataclass(frozen=True)
class AudioFile:
    """A clip of audio that a record names or holds.

    Attributes:
        file: where it is.
    """

    file: MediaFile

    def __str__(self) -> str:
        return str(self.file)


NamedMedia = MediaFile | VideoFile | AudioFile
"""A media item of a record: an image by its place alone."""


def file_of(item: NamedMedia) -> MediaFile:
    """The place of a media item."""
    return item.file if isinstance(item, VideoFile | AudioFile) else item


def kind_of(item: NamedMedia | OwnMedia) -> str:
    """``"image"``, ``"video"`` or ``"audio"``; ``"media item"`` of one that knows how it is read."""
    kinds = {VideoFile: "video", AudioFile: "audio"}
    return kinds.get(type(item), "media item" if isinstance(item, OwnMedia) else "image")


@contextmanager
def opened(file: MediaFile, error: type[MediaError]) -> Iterator[BinaryIO]:
    """The bytes of a media item, from their beginning.

    Args:
        file: where it is.
        error: what is raised where it cannot be opened.
    """
    if isinstance(file, EncodedMedia):
        if not file.content:
            raise error(_EMPTY)
        yield io.BytesIO(file.content)
        return
    try:
        file = file.path() if isinstance(file, MediaAddress) else file
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for somebody who writes into it
            raise error("it is a folder" if stat.S_ISDIR(found.st_mode) else "it is a pipe or a device, and no file")
        if found.st_size == 0 and isinstance(file, Path):  # elsewhere a size may not be known
            raise error(_EMPTY)
        stream = file.open("rb")
    except FileNotFoundError:
        raise error("there is no such file") from None
    except error:
        raise
    except MediaError as failure:
        raise error(str(failure)) from None
    except (
        Exception
    ) as failure:  # a ValueError: the name holds a zero byte; behind an address, whatever its library has
        if not isinstance(failure, OSError | ValueError) and isinstance(file, Path) and is_local(file):
            raise
        raise error(f"it cannot be opened ({failure})") from failure
    with stream:
        yield stream
