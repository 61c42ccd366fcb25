"""What a record means, wherever it lies: ``messages``, LLaVA's ``conversations``, text alone, or token ids."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import data_path
from flowtrain_lightning.data.given_tokens import GivenTokens
from flowtrain_lightning.data.loaded_media import OwnMedia
from flowtrain_lightning.data.media_files import EncodedMedia, MediaFile, VideoFile
from flowtrain_lightning.data.understood import (
    NotUnderstoodError,
    check_media,
    check_part,
    system_of,
    written_beside_turns,
    written_in_turn,
)

MARKERS = {"image": "<image>", "video": "<video>"}
"""Mark in a record's text where its next image or video belongs."""

_MARKER = re.compile("|".join(MARKERS.values()))
_KINDS = {marker: kind for kind, marker in MARKERS.items()}

_PART_TYPES = {"text": "text", **{f"{kind}{end}": kind for kind in MARKERS for end in ("", "_url")}}
_PART_KEYS = {kind: (kind, "path", "url", f"{kind}_url") for kind in MARKERS}
"""Under which a part of a content may name its image or video; parts that name none take the next of the record's."""

_A_FILE = {"image": "an image file", "video": "a video file"}

_ON_THE_WEB = re.compile(r"(.*::)?https?://")
"""Also behind another address, as fsspec chains them: ``simplecache::https://...``."""

_LLAVA_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Turn:
    """What one role says, with an ``<image>`` or ``<video>`` marker for each media item.

    Attributes:
        role: who says it.
        text: what is said.
        learned: False where an assistant's turn shall not be learned (``"weight": 0`` in the data).
        others: what else the turn holds, for the template to write: ``tool_calls``, say.
    """

    role: str
    text: str
    learned: bool = True
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """``"image"`` or ``"video"`` for each marker, in order."""
        return tuple(_KINDS[marker] for marker in _MARKER.findall(self.text))

    @property
    def texts(self) -> list[str]:
        """What stands before, between and behind the markers: one more than there are of these."""
        return _MARKER.split(self.text)


@dataclass(frozen=True)
class Record:
    """One record of the data.

    Attributes:
        where: the file and the record's number and id, for messages.
        id: the record's ``id``, or its number (from 1) where it has none.
        turns: the conversation; empty where the record is text alone or token ids.
        media: where each image and each video is: one per marker, in order. Of a source of one's own, whatever can
            load itself.
        fields: the record as it stands in the data.
        others: what the record holds beside its turns for the template to write: ``tools``, say.
        written: what is not a conversation: text alone, which is learned as it stands, or token ids.
    """

    where: str
    id: str
    turns: tuple[Turn, ...]
    media: tuple[MediaFile | VideoFile | OwnMedia, ...]
    fields: dict[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    written: str | GivenTokens | None = None

    @property
    def files(self) -> tuple[MediaFile | VideoFile, ...]:
        """Where each image and each video is, in order, but for what loads itself."""
        return tuple(item for item in self.media if not isinstance(item, OwnMedia))

    @property
    def images(self) -> tuple[MediaFile, ...]:
        """Where each image is, in order."""
        return tuple(item for item in self.files if not isinstance(item, VideoFile))

    @property
    def videos(self) -> tuple[VideoFile, ...]:
        """Where each video is, in order."""
        return tuple(item for item in self.media if isinstance(item, VideoFile))


def parse(fields: Any, store: object, number: int, file_of: Callable[[str], MediaFile]) -> Record:
    """What one JSON value means.

    Args:
        fields: the value.
        store: where it lies, for messages.
        number: its number there, from 0.
        file_of: finds the image or video that a record calls by some name.

    Raises:
        DataError: it is of none of the kinds that are known, or markers and images disagree, or it holds what would
            change what is learned and is not obeyed.
    """
    try:
        return _parsed(fields, f"{store}, record {number + 1}", number, file_of)
    except RecursionError as error:
        raise DataError(f"{store}, record {number + 1}: it is nested too deep to be understood.") from error


def _parsed(fields: Any, where: str, number: int, file_of: Callable[[str], MediaFile]) -> Record:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(fields).__name__}.")
    name = str(fields.get("id", number + 1))
    where = f"{where} (id {name!r:.80})" if "id" in fields else where
    try:
        others = written_beside_turns(fields)
        beside = {kind: _beside(fields, kind, where) for kind in MARKERS}
        if "messages" not in fields and "conversations" not in fields:
            return _without_turns(fields, where, name, beside, file_of)
        turns, named = _conversation(fields, where)
    except NotUnderstoodError as error:
        raise DataError(f"{where}: {error}.") from None
    media = {kind: iter(_of_kind(kind, turns, named[kind], beside[kind], where, file_of)) for kind in MARKERS}
    in_order = tuple(next(media[kind]) for turn in turns for kind in turn.kinds)
    return Record(where, name, turns, in_order, fields, others)


def _of_kind(
    kind: str,
    turns: tuple[Turn, ...],
    named: list[Any],
    beside: list[Any],
    where: str,
    file_of: Callable[[str], MediaFile],
) -> list[MediaFile | VideoFile]:
    """The images or the videos of a record, one for each of their markers."""
    if named and beside:
        raise DataError(f"{where}: it names {kind}s within its turns and beside them; name all of them in one way.")
    items = named or beside
    markers = sum(turn.kinds.count(kind) for turn in turns)
    if markers != len(items):
        raise DataError(
            f"{where}: its text has {markers} {MARKERS[kind]} markers, but it names {len(items)} {kind}s; "
            f"give one {kind} for each marker, in order."
        )
    return [_media(item, kind, where, file_of) for item in items]


def _conversation(fields: dict[str, Any], where: str) -> tuple[tuple[Turn, ...], dict[str, list[Any]]]:
    """The turns, and the images and videos that are named within them."""
    if "messages" in fields:
        turns, named = _turns(fields["messages"], where, "messages", "role", "content")
    else:
        turns, named = _turns(fields["conversations"], where, "conversations", "from", "value")
    system = system_of(fields)
    if system is None:
        return turns, named
    if turns[0].role == "system":
        raise DataError(f"{where}: its first turn is the system's, but it has 'system' beside its turns too; keep one.")
    return (Turn("system", system), *turns), named


def _without_turns(
    fields: dict[str, Any],
    where: str,
    name: str,
    beside: Mapping[str, list[Any]],
    file_of: Callable[[str], MediaFile],
) -> Record:
    """A record of token ids or of text alone."""
    if beside["video"]:
        raise DataError(f"{where}: only conversations may have videos; write it as 'messages'.")
    images = tuple(_media(image, "image", where, file_of) for image in beside["image"])
    if "input_ids" in fields:
        try:
            return Record(where, name, (), images, fields, written=GivenTokens.of(fields))
        except ValueError as error:
            raise DataError(f"{where}: {error}.") from None
    if "text" in fields:
        if images:
            raise DataError(f"{where}: text alone has no images; write text with images as 'messages'.")
        return Record(where, name, (), (), fields, written=_text_alone(fields, where))
    raise DataError(
        f"{where}: expected 'messages' (with 'images'), 'conversations' (with 'image'), 'input_ids' or 'text', found "
        "none of them."
    )


def _beside(fields: dict[str, Any], kind: str, where: str) -> list[Any]:
    """The images or videos that are named beside the turns."""
    both = [_several(fields.get(name)) for name in (f"{kind}s", kind)]
    if all(both):
        raise DataError(f"{where}: it has '{kind}s' and '{kind}'; name all {kind}s in one of them.")
    items = both[0] or both[1]
    for item in items:
        check_media(item, kind)
    return [item.get("path") if _is_reference(item) else item for item in items]


def _is_reference(item: Any) -> bool:
    """Whether it says where an image or a video is and does not hold it; ``b""`` holds one, which is empty."""
    return isinstance(item, dict) and not isinstance(item.get("bytes"), bytes) and not item.get("bytes")


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _media(item: Any, kind: str, where: str, file_of: Callable[[str], MediaFile]) -> MediaFile | VideoFile:
    """Where an image or a video is."""
    file = _file(item, kind, where, file_of)
    return VideoFile(file) if kind == "video" else file


def _file(item: Any, kind: str, where: str, file_of: Callable[[str], MediaFile]) -> MediaFile:
    """The file that a record names by its path, or holds: in bytes, or as a ``data:`` address."""
    if isinstance(item, dict) and isinstance(item.get("bytes"), bytes):
        return EncodedMedia(str(item.get("path") or "of the record"), item["bytes"])
    if isinstance(item, bytes):
        return EncodedMedia("of the record", item)
    if not isinstance(item, str):
        raise DataError(f"{where}: every {kind} needs a path, a string, or the bytes of {_A_FILE[kind]}.")
    if item.startswith("data:"):
        return EncodedMedia("of the record", _embedded(item, kind, where))
    if _ON_THE_WEB.match(item):
        raise DataError(
            f"{where}: the {kind} {item[:60]!r} is no file. {kind.capitalize()}s are read from files; save it as one, "
            "and name its path."
        )
    return _at_address(item, kind, where) if "://" in item else file_of(item)


def _at_address(item: str, kind: str, where: str) -> MediaFile:
    try:
        return data_path(item)
    except DataError as error:
        raise DataError(f"{where}: its {kind} {error}") from error


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
    _refuse_halves(text, where)
    return text


def _turns(
    items: Any, where: str, name: str, role_key: str, text_key: str
) -> tuple[tuple[Turn, ...], dict[str, list[Any]]]:
    """The turns, and the images and videos that are named within them."""
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: '{name}' must be a list with at least one turn.")
    turns: list[Turn] = []
    named: dict[str, list[Any]] = {kind: [] for kind in MARKERS}
    for item in items:
        role, content = (item.get(role_key), item.get(text_key)) if isinstance(item, dict) else (None, None)
        learned, others = written_in_turn(item, (role_key, text_key)) if isinstance(item, dict) else (True, {})
        content = "" if content is None and "tool_calls" in others else content
        text = _joined(content, named, where) if isinstance(content, list) else content
        if not isinstance(role, str) or not isinstance(text, str):
            raise DataError(f"{where}: every turn in '{name}' needs '{role_key}' and '{text_key}', both strings.")
        _refuse_halves(text, where)
        turns.append(Turn(_LLAVA_ROLES.get(role, role), text, learned, others))
    return tuple(turns), named


def _joined(parts: list[Any], named: Mapping[str, list[Any]], where: str) -> str:
    """Text with markers of content that is a list, as chat templates take it; what it names goes to ``named``."""
    text = ""
    for part in parts:
        kind = _PART_TYPES.get(str(part.get("type"))) if isinstance(part, dict) else None
        if kind is not None:
            check_part(part)
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in MARKERS:
            text += MARKERS[kind]
            items = [part[key] for key in _PART_KEYS[kind] if part.get(key) is not None][:1]
            named[kind].extend(
                (item.get("path") if item.get("url") is None else item["url"]) if _is_reference(item) else item
                for item in items
            )
        else:
            raise DataError(
                f"{where}: content that is a list holds {{'type': 'text', 'text': ...}}, {{'type': 'image'}} and "
                f"{{'type': 'video'}}, but here it has {str(part)[:80]}."
            )
    return text


def _refuse_halves(text: str, where: str) -> None:
    """JSON can hold one half of a pair that UTF-16 writes a character with; fast tokenizers fail there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{where}: its text holds half of a character, {half}, as is left where an emoji was cut; take it out."
        ) from error
