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
        yield io.BytesIO(file.content)
        return
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for somebody who writes into it
            raise error("it is a folder" if stat.S_ISDIR(mode) else "it is a pipe or a device, and no file")
        stream = file.open("rb")
    except FileNotFoundError:
        raise error("there is no such file") from None
    except MediaError:
        raise
    except (OSError, ValueError) as failure:  # a ValueError: the name holds a zero byte
        raise error(f"it cannot be opened ({failure})") from failure
    with stream:
        yield stream
