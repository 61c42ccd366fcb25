"""Reads records, wherever they lie: a conversation with its media, text alone, or token ids."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import PROTOCOLS, check_readable, protocols_of
from flowtrain_lightning.data.media.loaded_media import OwnMedia
from flowtrain_lightning.data.media.media_files import (
    AudioFile,
    EncodedMedia,
    MediaAddress,
    MediaFile,
    NamedMedia,
    VideoFile,
)
from flowtrain_lightning.data.media.media_files import file_of as place_of
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.completion import COMPLETED, Completion
from flowtrain_lightning.data.records.given_tokens import GivenTokens
from flowtrain_lightning.data.records.record_fields import check_meaning, check_pictures, form_of, written_beside_turns
from flowtrain_lightning.data.records.record_turns import (
    ASSISTANT,
    MARKERS,
    ToGenerate,
    Turn,
    conversation_of,
    is_reference,
    refuse_halves,
)
from flowtrain_lightning.data.records.understood import NotUnderstoodError, check_media, check_other_names

_A_FILE = {"image": "an image file", "video": "a video file", "audio": "an audio file"}

_LONGEST_PATH = 4096
"""Characters that systems take."""


@dataclass(frozen=True)
class Record:
    """One record of the data.

    Attributes:
        where: the file and the record's number and id, for messages.
        id: the record's ``id``, or its number (from 1) where it has none.
        turns: the conversation; empty where the record is text alone or token ids.
        media: where each image, video and clip of audio is: one per marker, in order. Of a source of one's own,
            whatever can load itself.
        fields: the record as it stands in the data.
        others: what the record holds beside its turns for the template to write: ``tools``, say.
        written: what is not a conversation: text alone, which is learned as it stands, a prompt and its completion,
            or token ids.
        status: of each media item size and time of change of its file when it was measured, see `MediaStatus`; empty
            before.
        generated: numbers of the media items that are to be generated, and not encoded.
    """

    where: str
    id: str
    turns: tuple[Turn, ...]
    media: tuple[NamedMedia | OwnMedia, ...]
    fields: dict[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    written: str | Completion | GivenTokens | None = None
    status: tuple[tuple[int, int], ...] = ()
    generated: frozenset[int] = frozenset()

    @property
    def files(self) -> tuple[NamedMedia, ...]:
        """The places of images, videos and audio, in order, but for what loads itself."""
        return tuple(item for item in self.media if not isinstance(item, OwnMedia))

    @property
    def images(self) -> tuple[MediaFile, ...]:
        """The places of images, in order."""
        return tuple(item for item in self.files if not isinstance(item, VideoFile | AudioFile))

    @property
    def videos(self) -> tuple[VideoFile, ...]:
        """The places of videos, in order."""
        return tuple(item for item in self.media if isinstance(item, VideoFile))

    @property
    def audios(self) -> tuple[AudioFile, ...]:
        """The places of clips of audio, in order."""
        return tuple(item for item in self.media if isinstance(item, AudioFile))

    @property
    def answer(self) -> str | None:
        """The right answer: the last turn, where it is the assistant's, or the completion; else None."""
        if isinstance(self.written, Completion):
            return self.written.text
        return self.turns[-1].text if self.turns and self.turns[-1].role == ASSISTANT else None

    @property
    def question(self) -> str:
        """The text before the answer, as a person would read it; empty of token ids."""
        if isinstance(self.written, Completion):
            return self.written.prompt
        asked = self.turns if self.answer is None else self.turns[:-1]
        return (
            self.written if isinstance(self.written, str) else "\n".join(f"{turn.role}: {turn.text}" for turn in asked)
        )

    @property
    def bytes_inside(self) -> int:
        """Bytes of media that lie in the record itself."""
        files = map(place_of, self.files)
        return sum(len(file.content) for file in files if isinstance(file, EncodedMedia))


def parse(
    fields: Any,
    store: object,
    number: int,
    file_of: Callable[[str], MediaFile],
    ignored: Collection[str] = (),
    columns: Columns | None = None,
) -> Record:
    """Reads one JSON value.

    Args:
        fields: the value.
        store: where it lies, for messages.
        number: its number there, from 0.
        file_of: finds the image, video or audio that a record calls by some name.
        ignored: fields that are as if they were not there.
        columns: which fields hold a question and an answer; None: it has one of the usual forms.

    Raises:
        DataError: it is of none of the kinds that are known, or markers and images disagree, or it holds what would
            change what is learned and is not obeyed.
    """
    try:
        return _parsed(fields, f"{store}, record {number + 1}", number, file_of, ignored, columns)
    except RecursionError as error:
        raise DataError(f"{store}, record {number + 1}: it is nested too deep to be understood.") from error


def _parsed(
    fields: Any,
    where: str,
    number: int,
    file_of: Callable[[str], MediaFile],
    ignored: Collection[str],
    columns: Columns | None,
) -> Record:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(fields).__name__}.")
    there = {key: value for key, value in fields.items() if value is not None and key not in ignored}
    name = str(there.get("id", number + 1))
    where = f"{where} (id {name!r:.80})" if "id" in there else where
    try:
        there = there if columns is None else columns.conversation(there)
        form = form_of(there)
        check_meaning(there, form)
        beside = {kind: _beside(there, kind, where) for kind in MARKERS}
        conversation = conversation_of(there, {kind: len(items) for kind, items in beside.items()}, where)
        for kind in MARKERS:
            if not beside[kind] and (conversation is None or not conversation[1][kind]):
                check_other_names(there, kind)
        if conversation is None:
            record = replace(_without_turns(there, where, name, beside, file_of), fields=fields)
        else:
            turns, named = conversation
            media = {kind: iter(_of_kind(kind, turns, named[kind], beside[kind], where, file_of)) for kind in MARKERS}
            in_order = [next(media[kind]) for turn in turns for kind in turn.kinds]
            generated = frozenset(number for number, (_, is_generated) in enumerate(in_order) if is_generated)
            files, others = tuple(file for file, _ in in_order), written_beside_turns(there)
            record = Record(where, name, turns, files, fields, others, generated=generated)
        check_pictures(there, form, [str(item) for item in record.media])
    except NotUnderstoodError as error:
        raise DataError(f"{where}: {error}.") from None
    return record


def _of_kind(
    kind: str,
    turns: tuple[Turn, ...],
    named: list[Any],
    beside: list[Any],
    where: str,
    file_of: Callable[[str], MediaFile],
) -> list[tuple[NamedMedia, bool]]:
    """Media of one kind of a record, one for each of their markers, and whether they are to be generated."""
    if named and beside:
        raise DataError(f"{where}: it names {kind}s within its turns and beside them; name all of them in one way.")
    items = named or beside
    markers = sum(turn.kinds.count(kind) for turn in turns)
    if markers != len(items):
        raise DataError(
            f"{where}: its text has {markers} {MARKERS[kind]} markers, but it names {len(items)} {kind}s; "
            f"give one {kind} for each marker, in order."
        )
    told = [(item.item, True) if isinstance(item, ToGenerate) else (item, False) for item in items]
    return [(_media(item, kind, where, file_of), is_generated) for item, is_generated in told]


def _without_turns(
    fields: dict[str, Any],
    where: str,
    name: str,
    beside: Mapping[str, list[Any]],
    file_of: Callable[[str], MediaFile],
) -> Record:
    """A record of token ids, of text alone, or of a prompt and its completion."""
    for kind in ("video", "audio"):
        if beside[kind]:
            raise DataError(f"{where}: only conversations may have {kind}s; write it as 'messages'.")
    images = tuple(_media(image, "image", where, file_of) for image in beside["image"])
    if "input_ids" in fields:
        try:
            return Record(where, name, (), images, fields, written=GivenTokens.of(fields))
        except ValueError as error:
            raise DataError(f"{where}: {error}.") from None
    if "text" in fields:
        if images:
            raise DataError(f"{where}: text alone has no images; write text with images as 'messages'.")
        if "file_name" in fields:
            raise DataError(
                f"{where}: beside its 'text' it names a file ('file_name'), as lists of images do; write text with "
                "images as 'messages', or take the name out."
            )
        return Record(where, name, (), (), fields, written=_text_alone(fields, where))
    if all(isinstance(fields.get(part), str) for part in COMPLETED):
        return Record(where, name, (), (), fields, written=_completion(fields, where))
    raise DataError(
        f"{where}: expected 'messages' or 'texts' (with 'images'), 'conversations' (with 'image'), 'prompt' and "
        f"'completion', 'input_ids' or 'text', found none of them but "
        f"{', '.join(map(repr, fields)) or 'nothing':.200}; docs/data.md shows how other columns are read."
    )


def _beside(fields: dict[str, Any], kind: str, where: str) -> list[Any]:
    """The images, videos or clips of audio that are named beside the turns."""
    both = [_several(fields.get(name)) for name in (f"{kind}s", kind)]
    if all(both):
        raise DataError(f"{where}: it has '{kind}s' and '{kind}'; name all {kind}s in one of them.")
    items = both[0] or both[1]
    for item in items:
        check_media(item, kind)
    return [item.get("path") if is_reference(item) else item for item in items]


def _several(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


def _media(item: Any, kind: str, where: str, file_of: Callable[[str], MediaFile]) -> NamedMedia:
    """Reads the place of an image, a video or a clip of audio."""
    file = _file(item, kind, where, file_of)
    return VideoFile(file) if kind == "video" else AudioFile(file) if kind == "audio" else file


def _file(item: Any, kind: str, where: str, file_of: Callable[[str], MediaFile]) -> MediaFile:
    """The file that a record names by its path, or holds: in bytes, or as a ``data:`` address."""
    if isinstance(item, dict) and isinstance(item.get("bytes"), bytes):
        return EncodedMedia(str(item.get("path") or "of the record"), item["bytes"])
    if isinstance(item, bytes):
        return EncodedMedia("of the record", item)
    if not isinstance(item, str):
        raise DataError(
            f"{where}: every {kind} needs a path, a string, or the bytes of {_A_FILE[kind]}, but one is a "
            f"{type(item).__name__}."
        )
    if item.startswith("data:"):
        return EncodedMedia("of the record", _embedded(item, kind, where))
    if len(item) > _LONGEST_PATH:
        raise DataError(
            f"{where}: the {kind} {item[:40]!r}... has {len(item)} characters, more than a path can have. Write bytes "
            f"in base64 as 'data:{kind}/...;base64,' and what you have there."
        )
    return _at_address(item, kind, where) if "://" in item else file_of(item)


def _at_address(item: str, kind: str, where: str) -> MediaAddress:
    """An address; whether records may name such is asked when it is opened, so that a record can be left out for it."""
    for protocol in PROTOCOLS.intersection(protocols_of(item)):
        try:
            check_readable(protocol)  # a library that is missing is no fault of the record
        except DataError as error:
            raise DataError(f"{where}: its {kind} {item[:60]!r} cannot be opened: {error}") from error
    return MediaAddress(item)


def _embedded(address: str, kind: str, where: str) -> bytes:
    """The bytes of an address such as ``data:image/png;base64,...``."""
    head, comma, body = address.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not say ';base64,'")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"{where}: the {kind} {address[:40]!r} cannot be read: {error}.") from error


def _text_alone(fields: dict[str, Any], where: str) -> str:
    text = fields["text"]
    if not isinstance(text, str) or not text:
        raise DataError(f"{where}: 'text' must be a string with something in it.")
    refuse_halves(text, where)
    return text


def _completion(fields: dict[str, Any], where: str) -> Completion:
    beside_it = next((name for name in ("image", "images", "system", "tools") if fields.get(name)), None)
    if beside_it is not None:
        raise DataError(
            f"{where}: a 'prompt' and a 'completion' of plain text have no {beside_it!r}; write both as lists of turns."
        )
    prompt, text = (fields[part] for part in COMPLETED)
    if not prompt and not text:
        raise DataError(f"{where}: its 'prompt' and its 'completion' are both empty.")
    refuse_halves(prompt + text, where)
    return Completion(prompt, text)
