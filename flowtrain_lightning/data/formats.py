"""What a record means, wherever it lies: ``messages``, LLaVA's ``conversations``, text alone, or token ids."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowtrain_lightning.data.given_tokens import GivenTokens
from flowtrain_lightning.data.image_files import EncodedImage, ImageFile
from flowtrain_lightning.data.understood import (
    NotUnderstoodError,
    check_image,
    check_part,
    system_of,
    written_beside_turns,
    written_in_turn,
)

MEDIA_MARKER = "<image>"
"""Marks in a record's text where its next image belongs."""

_IMAGE_KEYS = ("image", "path", "url", "image_url")
"""Under which a part of a content may name its image; parts that name none take the next of the record's."""

_LLAVA_ROLES = {"human": "user", "gpt": "assistant"}


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the record."""


@dataclass(frozen=True)
class Turn:
    """What one role says, with a ``<image>`` marker for each image.

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


@dataclass(frozen=True)
class Record:
    """One record of the data.

    Attributes:
        where: the file and the record's number and id, for messages.
        id: the record's ``id``, or its number (from 1) where it has none.
        turns: the conversation; empty where the record is text alone or token ids.
        images: where each image is: one per marker, in order.
        fields: the record as it stands in the data.
        others: what the record holds beside its turns for the template to write: ``tools``, say.
        written: what is not a conversation: text alone, which is learned as it stands, or token ids.
    """

    where: str
    id: str
    turns: tuple[Turn, ...]
    images: tuple[ImageFile, ...]
    fields: dict[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    written: str | GivenTokens | None = None


def parse(fields: Any, store: object, number: int, file_of: Callable[[str], ImageFile]) -> Record:
    """What one JSON value means.

    Args:
        fields: the value.
        store: where it lies, for messages.
        number: its number there, from 0.
        file_of: finds the image that a record calls by some name.

    Raises:
        DataError: it is of none of the kinds that are known, or markers and images disagree, or it holds what would
            change what is learned and is not obeyed.
    """
    try:
        return _parsed(fields, f"{store}, record {number + 1}", number, file_of)
    except RecursionError as error:
        raise DataError(f"{store}, record {number + 1}: it is nested too deep to be understood.") from error


def _parsed(fields: Any, where: str, number: int, file_of: Callable[[str], ImageFile]) -> Record:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(fields).__name__}.")
    name = str(fields.get("id", number + 1))
    where = f"{where} (id {name!r})" if "id" in fields else where
    try:
        others = written_beside_turns(fields)
        beside = _beside(fields, where)
        if "messages" not in fields and "conversations" not in fields:
            return _without_turns(fields, where, name, tuple(_image(image, where, file_of) for image in beside))
        turns, named = _conversation(fields, where)
    except NotUnderstoodError as error:
        raise DataError(f"{where}: {error}.") from None
    if named and beside:
        raise DataError(f"{where}: it names images within its turns and beside them; name all of them in one way.")
    images = named or beside
    markers = sum(turn.text.count(MEDIA_MARKER) for turn in turns)
    if markers != len(images):
        raise DataError(
            f"{where}: its text has {markers} {MEDIA_MARKER} markers, but it names {len(images)} images; "
            "give one image for each marker, in order."
        )
    return Record(where, name, turns, tuple(_image(image, where, file_of) for image in images), fields, others)


def _conversation(fields: dict[str, Any], where: str) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns, and the images that are named within them."""
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


def _without_turns(fields: dict[str, Any], where: str, name: str, images: tuple[ImageFile, ...]) -> Record:
    """A record of token ids or of text alone."""
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


def _beside(fields: dict[str, Any], where: str) -> list[Any]:
    """The images that are named beside the turns."""
    both = [_several(fields.get(name)) for name in ("images", "image")]
    if all(both):
        raise DataError(f"{where}: it has 'images' and 'image'; name all images in one of them.")
    images = both[0] or both[1]
    for image in images:
        check_image(image)
    return [item.get("path") if isinstance(item, dict) and not item.get("bytes") else item for item in images]


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _image(image: Any, where: str, file_of: Callable[[str], ImageFile]) -> ImageFile:
    """Where an image is that a record names by its path, or holds: in bytes, or as a ``data:`` address."""
    if isinstance(image, dict) and isinstance(image.get("bytes"), bytes):
        return EncodedImage(str(image.get("path") or "of the record"), image["bytes"])
    if isinstance(image, bytes):
        return EncodedImage("of the record", image)
    if not isinstance(image, str):
        raise DataError(f"{where}: every image needs a path, a string, or the bytes of an image file.")
    if image.startswith("data:"):
        return EncodedImage("of the record", _embedded(image, where))
    if image.startswith(("http://", "https://")):
        raise DataError(
            f"{where}: the image {image[:60]!r} is no file. Images are read from files; save it as one, and name "
            "its path."
        )
    return file_of(image)


def _embedded(address: str, where: str) -> bytes:
    """The bytes of an address such as ``data:image/png;base64,...``."""
    head, comma, body = address.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not say ';base64,'")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"{where}: the image {address[:40]!r} cannot be read: {error}.") from error


def _text_alone(fields: dict[str, Any], where: str) -> str:
    text = fields["text"]
    if not isinstance(text, str) or not text:
        raise DataError(f"{where}: 'text' must be a string with something in it.")
    _refuse_halves(text, where)
    return text


def _turns(items: Any, where: str, name: str, role_key: str, text_key: str) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns, and the images that are named within them."""
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: '{name}' must be a list with at least one turn.")
    turns, images = [], []
    for item in items:
        role, content = (item.get(role_key), item.get(text_key)) if isinstance(item, dict) else (None, None)
        learned, others = written_in_turn(item, (role_key, text_key)) if isinstance(item, dict) else (True, {})
        content = "" if content is None and "tool_calls" in others else content
        text, named = _parts(content, where) if isinstance(content, list) else (content, [])
        if not isinstance(role, str) or not isinstance(text, str):
            raise DataError(f"{where}: every turn in '{name}' needs '{role_key}' and '{text_key}', both strings.")
        _refuse_halves(text, where)
        turns.append(Turn(_LLAVA_ROLES.get(role, role), text, learned, others))
        images += named
    return tuple(turns), images


def _parts(parts: list[Any], where: str) -> tuple[str, list[Any]]:
    """Text with markers, and the images that are named, of content that is a list, as chat templates take it."""
    text, images = "", []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in ("text", "image", "image_url"):
            check_part(part)
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in ("image", "image_url"):
            text += MEDIA_MARKER
            images += [part[key] for key in _IMAGE_KEYS if part.get(key) is not None][:1]
        else:
            raise DataError(
                f"{where}: content that is a list holds {{'type': 'text', 'text': ...}} and {{'type': 'image'}}, but "
                f"here it has {str(part)[:80]}."
            )
    return text, [
        image.get("url", image.get("path")) if isinstance(image, dict) and not image.get("bytes") else image
        for image in images
    ]


def _refuse_halves(text: str, where: str) -> None:
    """JSON can hold one half of a pair that UTF-16 writes a character with; fast tokenizers fail there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{where}: its text holds half of a character, {half}, as is left where an emoji was cut; take it out."
        ) from error
