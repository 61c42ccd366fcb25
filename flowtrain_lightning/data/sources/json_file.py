"""Records in a file of JSON: one a line, or all in one array."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.records.formats import Record, parse
from flowtrain_lightning.data.sources.data_file import DataFile
from flowtrain_lightning.data.sources.record_store import Location
from flowtrain_lightning.packing import IntArray


class JsonFile(DataFile):
    """A file of JSON Lines (empty lines are skipped), or of one JSON array. A location is offset and length in bytes.

    Paths of images are relative to the file's folder.
    """

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.path.name

    def locate(self) -> Iterator[Location]:
        """Find the place of each record.

        Raises:
            DataError: the JSON array is broken.
        """
        with self.open() as file:
            start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        return self._locate_in_array() if start.startswith(b"[") else self._locate_lines()

    def lengths(self, locations: IntArray) -> IntArray:
        """``[records]`` how many bytes are read for each."""
        return locations[:, 1]

    def records(self, first: int, locations: IntArray) -> list[Record]:
        """Records that follow each other.

        Raises:
            DataError: the file was changed, or a record cannot be understood.
        """
        if len(locations) == 0:
            return []
        begin, end = int(locations[0, 0]), int(locations[-1].sum())
        content = self.read(begin, end - begin)
        return [
            self._record(number, content[offset - begin : offset - begin + length])
            for number, (offset, length) in enumerate(locations.tolist(), first)
        ]

    def _record(self, number: int, content: bytes) -> Record:
        where = f"{self.path}, record {number + 1}"
        fields, beside = decoded_json(content, where), self.path.parent.joinpath
        return parse(fields, self.path, number, beside, self.ignored, self.columns)

    def _locate_lines(self) -> Iterator[Location]:
        offset = 0
        with self.open() as file:
            for line in file:
                if line.strip():
                    yield offset, len(line)
                offset += len(line)

    def _locate_in_array(self) -> Iterator[Location]:
        with self.open() as file:
            text = _as_text(file.read())
        decoder = json.JSONDecoder()
        position, number = text.index("[") + 1, 0
        offset = len(_as_bytes(text[:position]))
        while True:
            start = _after_space(text, position)
            if text[start : start + 1] == "]":
                if _after_space(text, start + 1) < len(text):
                    raise DataError(
                        f"{self.path}: more follows after the JSON array, which ends with record {number}; put all "
                        "records into one array, or write each on a line of its own."
                    )
                return
            if number > 0:
                if text[start : start + 1] != ",":
                    raise DataError(
                        f"{self.path}: expected ',' or ']' after record {number}; the JSON array is broken there."
                    )
                start = _after_space(text, start + 1)
            try:
                _, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError) as error:
                raise _not_json(f"{self.path}, record {number + 1}", error) from error
            # Characters are counted as bytes piece by piece: reading back needs byte offsets.
            offset += len(_as_bytes(text[position:start]))
            length = len(_as_bytes(text[start:end]))
            yield offset, length
            position, offset, number = end, offset + length, number + 1


def decoded_json(content: bytes, where: str) -> Any:
    """The value that these bytes write.

    Raises:
        DataError: they are not valid JSON in UTF-8, or hold what Python does not read.
    """
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_each_key_once)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 ({error}); save the file as UTF-8.") from error
    except _KeyTwiceError as error:
        raise DataError(f"{where}: it has {str(error)!r:.80} twice in one object; keep one of them.") from None
    except (ValueError, RecursionError) as error:
        raise _not_json(where, error) from error


class _KeyTwiceError(ValueError):
    """An object of JSON has this key twice: readers of JSON take one of the values and drop the other."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyTwiceError(next(key for key in keys if keys.count(key) > 1))
    return found


def _not_json(where: str, error: Exception) -> DataError:
    if isinstance(error, RecursionError):
        return DataError(f"{where}: its JSON is nested too deep; a record is no more than a few levels deep.")
    if isinstance(error, json.JSONDecodeError):
        return DataError(f"{where}: not valid JSON ({error}).")
    return DataError(f"{where}: it holds a number of too many digits ({error}); write such a number as a string.")


def _as_text(content: bytes) -> str:
    """UTF-8 with room for bytes that are none: the record in which they stand is refused when it is read."""
    return content.decode(errors="surrogateescape")


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
