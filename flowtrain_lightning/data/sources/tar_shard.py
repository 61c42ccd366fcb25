"""Records in a tar shard as WebDataset writes it: files of one name and several endings are one record."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.formats import Record, parse
from flowtrain_lightning.data.media_files import EncodedMedia
from flowtrain_lightning.data.record_turns import MARKERS
from flowtrain_lightning.data.sources.data_file import DataFile
from flowtrain_lightning.data.sources.json_file import decoded_json
from flowtrain_lightning.data.sources.record_store import Location
from flowtrain_lightning.packing import IntArray

_ENDINGS = {
    "image": ("avif", "bmp", "gif", "jp2", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"),
    "video": ("asf", "avi", "flv", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "ogv", "webm", "wmv"),
}
_WORDS = ("json", "txt")
_BLOCK = 512


class TarShard(DataFile):
    """A tar file that is not compressed. A location is offset and length in bytes.

    The files of a record follow each other; what they are follows from their endings (all behind the first dot of the
    name). ``json`` is the record; it names images and videos by their endings or whole names or, where it names none,
    has them in order. Without ``json``, ``txt`` beside them is what the assistant says of them; alone, it is text.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path.name

    def locate(self) -> Iterator[Location]:
        """Where each record lies.

        Raises:
            DataError: it is no tar file, or a compressed or damaged one.
        """
        with self.open() as file:
            key, start, end = "", 0, 0
            for member in _members(file, self.path):
                if _key(member) != key:
                    if end > start:
                        yield start, end - start
                    key, start = _key(member), member.offset
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            if end > start:
                yield start, end - start

    def lengths(self, locations: IntArray) -> IntArray:
        """``[records]`` how many bytes are read for each."""
        return locations[:, 1]

    def records(self, first: int, locations: IntArray) -> list[Record]:
        """Records that follow each other.

        Raises:
            DataError: the file was changed, or a record cannot be understood.
        """
        found = []
        for number, (offset, length) in enumerate(locations.tolist(), first):
            content = io.BytesIO(self.read(offset, length))
            members = {member.name: _content(content, member) for member in _members(content, self.path)}
            found.append(self._record(number, members))
        return found

    def _record(self, number: int, members: dict[str, bytes]) -> Record:
        where = f"{self.path}, record {number + 1}"
        endings = {_ending(name): name for name in members}
        names = {kind: [name for name in members if _kind(name) in known] for kind, known in _ENDINGS.items()}
        key = _key_of(next(iter(members)))
        if "json" in endings:
            fields = decoded_json(members[endings["json"]], where)
        elif "txt" in endings:
            fields = self._caption(members[endings["txt"]], where, names)
        else:
            raise DataError(
                f"{where} ({key}): it has neither .json nor .txt, only {', '.join(sorted(endings))}. The files of a "
                "record follow each other, and their names are the same up to the first dot."
            )
        if isinstance(fields, dict):
            fields = {"id": key, **fields}
            for kind, of_kind in names.items():
                if of_kind and not any(name in fields for name in (kind, f"{kind}s", "text")):
                    fields |= _in_order(fields, kind, of_kind)

        def file_of(named: str) -> EncodedMedia:
            for name in (named, endings.get(named)):
                if name in members and _ending(name) not in _WORDS:
                    return EncodedMedia(name, members[name])
            raise DataError(f"{where} ({key}): {named!r}, which it names, is not in the shard beside it.")

        return parse(fields, self.path, number, file_of)

    def _caption(self, content: bytes, where: str, names: dict[str, list[str]]) -> dict[str, Any]:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: its text is not valid UTF-8 ({error}).") from error
        asked = {"role": "user", "content": "".join(MARKERS[kind] * len(names[kind]) for kind in MARKERS)}
        if not asked["content"]:
            return {"text": text}
        return {"messages": [asked, {"role": "assistant", "content": text}]}


def _in_order(fields: dict[str, Any], kind: str, names: list[str]) -> dict[str, Any]:
    """Images or videos for the markers of a record that names none."""
    if "conversations" in fields:
        return {kind: names}
    named = isinstance(fields.get("messages"), list) and any(
        isinstance(turn, dict) and isinstance(turn.get("content"), list) and _names_one(turn["content"], kind)
        for turn in fields["messages"]
    )
    return {} if named else {f"{kind}s": names}


def _names_one(parts: list[Any], kind: str) -> bool:
    """Whether a content that is a list names an image or a video by more than its place."""
    return any(
        isinstance(part, dict) and part.get("type") in (kind, f"{kind}_url") and len(part.keys() - {"type"}) > 0
        for part in parts
    )


def _members(file: BinaryIO, path: Path) -> Iterator[tarfile.TarInfo]:
    """The files of a tar file in order, but for hidden ones, as WebDataset has it: macOS puts such beside others."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and not member.name.rpartition("/")[2].startswith("."):
                    yield member
    except (tarfile.TarError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path}: it is no tar file that can be read at any place ({error}); unpack a compressed one first."
        ) from error


def _content(file: io.BytesIO, member: tarfile.TarInfo) -> bytes:
    return file.getvalue()[member.offset_data : member.offset_data + member.size]


def _key(member: tarfile.TarInfo) -> str:
    return _key_of(member.name)


def _key_of(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _ending(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2].lower()


def _kind(name: str) -> str:
    return name.rpartition(".")[2].lower()
