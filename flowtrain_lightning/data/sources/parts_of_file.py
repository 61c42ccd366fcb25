"""A file at an address of which only what is read is asked for, where others would read megabytes ahead."""

from __future__ import annotations

import io
import os
from pathlib import Path

from flowtrain_lightning.data.data_path import part_of


class PartsOfFile(io.RawIOBase):
    """The bytes of a file at an address, each read of which asks for just these.

    Args:
        path: the file.
        size: its bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__()
        self._path = path
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Lets the next read begin elsewhere."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads on, until the buffer is full or the file ends.

        Raises:
            OSError: the bytes cannot be had.
        """
        length = max(min(len(buffer), self._size - self._place), 0)
        if length:
            content = part_of(self._path, self._place, length)
            length = len(content)
            buffer[:length] = content
        self._place += length
        return length
