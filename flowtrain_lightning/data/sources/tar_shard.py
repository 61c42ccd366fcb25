"""Records in a tar shard as WebDataset writes it: files of one name and several endings are one record."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.media.media_endings import MEDIA_ENDINGS
from flowtrain_lightning.data.media.media_files import EncodedMedia
from flowtrain_lightning.data.records.formats import Record, parse
from flowtrain_lightning.data.records.record_turns import MARKERS
from flowtrain_lightning.data.sources.data_file import DataFile
from flowtrain_lightning.data.sources.json_file import decoded_json
from flowtrain_lightning.data.sources.record_store import Location
from flowtrain_lightning.data.sources.tar_members import BLOCK, members_of, members_within
from flowtrain_lightning.packing import IntArray

_WORDS = ("json", "txt")


class TarShard(DataFile):
    """A tar file that is not compressed. A location is offset and length in bytes.

    The files of a record follow each other; what they are follows from their endings (all behind the first dot of the
    name). ``json`` is the record; it names media by their endings or whole names or, where it names none,
    has them in order. Without ``json``, ``txt`` beside them is what the assistant says of them; alone, it is text.
    """

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.path.name

    def locate(self) -> Iterator[Location]:
        """Find the place of each record.

        Raises:
            DataError: it is no tar file, or a compressed or damaged one.
        """
        files = _RecordFiles(self.path)
        with self.open() as file:
            key, start, end = "", 0, 0
            for member in members_of(file, self.path):
                if _key_of(member.name) != key:
                    if end > start:
                        yield start, end - start
                    key, start = _key_of(member.name), member.offset
                    files.begin(key)
                files.add(member.name)
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
            files.end()
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
            members = {member.name: _content(content, member) for member in members_within(content, self.path, length)}
            found.append(self._record(number, members))
        return found

    def _record(self, number: int, members: dict[str, bytes]) -> Record:
        where = f"{self.path}, record {number + 1}"
        endings = {_ending(name): name for name in members}
        names = {kind: [name for name in members if _kind(name) in known] for kind, known in MEDIA_ENDINGS.items()}
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
                named = () if self.columns is None else (getattr(self.columns, kind, None),)
                if of_kind and not any(name in fields for name in (kind, f"{kind}s", "text", *named)):
                    fields |= _in_order(fields, kind, of_kind)

        unread = {name for of_kind in names.values() for name in of_kind if _ending(name) not in self.ignored}

        def file_of(named: str) -> EncodedMedia:
            for name in (named, endings.get(named)):
                if name in members and _ending(name) not in _WORDS:
                    unread.discard(name)
                    return EncodedMedia(name, members[name])
            raise DataError(f"{where} ({key}): {named!r}, which it names, is not in the shard beside it.")

        record = parse(fields, self.path, number, file_of, self.ignored, self.columns)
        if unread:
            name = min(unread)
            raise DataError(
                f"{where} ({key}): {name!r} lies beside it in the shard, but is not read; name it in the record, take "
                f"it out, or say that it means nothing: FlowDataModule(ignore_columns=[{_ending(name)!r}])."
            )
        return record

    def _caption(self, content: bytes, where: str, names: dict[str, list[str]]) -> dict[str, Any]:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: its text is not valid UTF-8 ({error}).") from error
        if "\0" in text:
            raise DataError(f"{where}: its text holds bytes of zero, so it is damaged; copy or write the shard anew.")
        asked = {"role": "user", "content": "".join(MARKERS[kind] * len(names[kind]) for kind in MARKERS)}
        if not asked["content"]:
            return {"text": text}
        return {"messages": [asked, {"role": "assistant", "content": text}]}


class _RecordFiles:
    """The files of each record of a shard, by their endings. Refuses a record that would lose some of them.

    Args:
        path: of the shard, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = ""
        self._endings: set[str] = set()
        self._known: dict[str, frozenset[str]] = {}
        self._kinds: dict[frozenset[str], frozenset[str]] = {}  # most records have the same: each is kept once

    def begin(self, key: str) -> None:
        """Another record begins."""
        self.end()
        self._key, self._endings = key, set()

    def add(self, name: str) -> None:
        """The record has this file."""
        ending = _ending(name)
        if ending in self._endings:
            raise DataError(
                f"{self._path}: its record {self._key!r:.200} has two files that end with '.{ending}', of which one "
                "would be dropped. Give every record a name of its own, and every file of a record an ending of its "
                "own, such as '.0.png' and '.1.png'."
            )
        self._endings.add(ending)

    def end(self) -> None:
        """The record has no more files."""
        found = frozenset(self._endings)
        before = self._known.get(self._key)
        # Shards that were joined may have two whole records of one name; two parts of one have no ending in common.
        if before is not None and not found & before:
            raise DataError(
                f"{self._path}: the files of its record {self._key!r:.200} do not follow each other: "
                f"{_told(found)} and {_told(before)} stand apart. Write the files of a record one after another (tar "
                "--sort=name)."
            )
        if found:
            self._known[self._key] = self._kinds.setdefault(found, found)


def _told(endings: frozenset[str]) -> str:
    return ", ".join(f".{ending}" for ending in sorted(endings))


def _in_order(fields: dict[str, Any], kind: str, names: list[str]) -> dict[str, Any]:
    """Media of a kind for the markers of a record that names none."""
    if "conversations" in fields:
        return {kind: names}
    named = isinstance(fields.get("messages"), list) and any(
        isinstance(turn, dict) and isinstance(turn.get("content"), list) and _names_one(turn["content"], kind)
        for turn in fields["messages"]
    )
    return {} if named else {f"{kind}s": names}


def _names_one(parts: list[Any], kind: str) -> bool:
    """Whether a content that is a list names a media item of a kind by more than its place."""
    return any(
        isinstance(part, dict) and part.get("type") in (kind, f"{kind}_url") and len(part.keys() - {"type"}) > 0
        for part in parts
    )


def _content(file: io.BytesIO, member: tarfile.TarInfo) -> bytes:
    return file.getvalue()[member.offset_data : member.offset_data + member.size]


def _key_of(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _ending(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2].lower()


def _kind(name: str) -> str:
    return name.rpartition(".")[2].lower()
