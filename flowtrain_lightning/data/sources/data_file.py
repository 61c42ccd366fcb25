"""A data file that is read at many places while a run lasts, and must stay as it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import WHOLE_FILES, in_this_process, is_local, part_of
from flowtrain_lightning.data.fingerprint import file_fingerprint
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.sources.parts_of_file import PartsOfFile


class DataFile:
    """A file whose bytes are read at places.

    Args:
        path: the file.
        ignored: fields of its records that are as if they were not there.
        columns: which fields hold a question and an answer, where records have none of the usual forms.

    Attributes:
        ignored: the same.
        columns: the same.

    Raises:
        DataError: there is no such file.
    """

    def __init__(self, path: Path, ignored: Collection[str] = (), columns: Columns | None = None) -> None:
        self._path = path
        self._process = os.getpid()
        self.ignored = ignored
        self.columns = columns
        self._status = self.status()
        self._held: str | None = None

    @property
    def path(self) -> Path:
        """The file."""
        if self._process != os.getpid():  # a fork of the one that opened it
            self._path = in_this_process(self._path)
            self._process = os.getpid()  # last, since several threads may ask
        return self._path

    def status(self) -> list[int]:
        """Its size, and when it was changed last.

        Raises:
            DataError: there is no such file.
        """
        try:
            found = self.path.stat()  # whether it is a file its server would be asked by beginning to read it
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"{self.path}: {self._missing()}") from error
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: it cannot be opened ({error}).") from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{self.path}: {self._missing()}")
        return [found.st_size, getattr(found, "st_mtime_ns", 0)]

    def content(self) -> str:
        """The fingerprint of its bytes."""
        return file_fingerprint(self.path)

    def hold(self, content: str) -> None:
        """From now on refuse to read where its bytes have changed."""
        self._held = content

    def open(self) -> BinaryIO:
        """The file, opened for reading.

        Raises:
            DataError: it was removed or changed.
        """
        try:
            file = self.path.open("rb")
        except OSError as error:
            if is_local(self.path) and not self.path.exists():
                raise DataError(f"{self.path}: it is gone; it was removed after the run began to read it.") from error
            raise DataError(f"{self.path}: it cannot be opened ({error}).") from error
        if is_local(self.path):  # elsewhere asking would take as long as reading
            self._refuse_changed(os.fstat(file.fileno()))
        else:
            self._refuse_whole_files(file)
        return file

    def open_for_parts(self) -> BinaryIO | PartsOfFile:
        """The file, opened by one who reads far apart, in pieces of a good size.

        Raises:
            DataError: it was removed or changed.
        """
        return self.open() if is_local(self.path) else PartsOfFile(self.path, self._status[0])

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on.

        Raises:
            DataError: the file was removed or changed, or is shorter.
        """
        path = self.path
        try:
            if is_local(path):
                with self.open() as file:
                    file.seek(offset)
                    content = file.read(length)
            else:
                content = part_of(path, offset, length)
        except OSError as error:
            raise DataError(f"{path}: it cannot be read ({error}).") from error
        if len(content) < length:
            raise DataError(f"{self.path}: it is shorter than when it was indexed; start again to index it anew.")
        return content

    def _refuse_changed(self, found: os.stat_result) -> None:
        status = [found.st_size, found.st_mtime_ns]
        if self._held is None or status == self._status:
            return
        if found.st_size == self._status[0] and self.content() == self._held:
            self._status = status  # only touched
            return
        how = "emptied" if found.st_size == 0 else "rewritten"
        raise DataError(
            f"{self.path}: it was {how} after the run began to read it ({self._status[0]} bytes then, {found.st_size} "
            "now), so its records are not those that were planned. Start again to index it anew."
        )

    def _refuse_whole_files(self, file: BinaryIO) -> None:
        try:
            file.seek(1)
            file.seek(0)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: it cannot be read ({WHOLE_FILES}).") from error

    def _missing(self) -> str:
        if self.path.is_dir():
            return "this is a folder; name its files, several as a list."
        if is_local(self.path) and self.path.exists():
            return "this is a pipe or a device, and no file; write its records into a file."
        return "there is no such file."
