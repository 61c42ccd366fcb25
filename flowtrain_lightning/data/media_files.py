"""Where a media item lies: a file, or bytes in the data themselves, opened with what is wrong said in a sentence."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO


class MediaError(ValueError):
    """A media item that cannot be used; the message says why, without naming the record."""


@dataclass(frozen=True)
class EncodedMedia:
    """A media item that stands in the data itself.

    Attributes:
        name: for messages.
        content: the bytes of an image or video file.
    """

    name: str
    content: bytes = field(repr=False)

    def __str__(self) -> str:
        return self.name


_EMPTY = "it is empty: there is not one byte in it"

MediaFile = Path | EncodedMedia
"""Where a media item is."""


@dataclass(frozen=True)
class VideoFile:
    """A video that a record names or holds.

    Attributes:
        file: where it is.
    """

    file: MediaFile

    def __str__(self) -> str:
        return str(self.file)


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
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for somebody who writes into it
            raise error("it is a folder" if stat.S_ISDIR(found.st_mode) else "it is a pipe or a device, and no file")
        if found.st_size == 0 and isinstance(file, Path):  # elsewhere a size may not be known
            raise error(_EMPTY)
        stream = file.open("rb")
    except FileNotFoundError:
        raise error("there is no such file") from None
    except MediaError:
        raise
    except (OSError, ValueError) as failure:  # a ValueError: the name holds a zero byte
        raise error(f"it cannot be opened ({failure})") from failure
    with stream:
        yield stream
