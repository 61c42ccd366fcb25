"""The fields of a record by its form: those that are read, and those that are refused as they would count for nothing.

Whatever else a record holds is passed over, if it says nothing of training and is no picture.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Set
from itertools import chain
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.media.media_endings import MEDIA_ENDINGS
from flowtrain_lightning.data.records.understood import NotUnderstoodError

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_BESIDE_TURNS = (*_MEDIA, "system", "tools")

FORMS: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids", "labels", "attention_mask", *_MEDIA),
    "messages": ("messages", *_BESIDE_TURNS),
    "conversations": ("conversations", *_BESIDE_TURNS),
    "prompt": ("prompt", "completion", *_BESIDE_TURNS),
    "texts": ("texts", *_BESIDE_TURNS),
    "text": ("text", *_MEDIA),
}
"""Fields that each form reads, by the field that marks the form; ``prompt`` marks none without ``completion``."""

_ALWAYS_READ = ("id",)
_WRITTEN = ("tools",)
"""Fields beside the turns that the template writes."""

_PAIRS = ("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images", "margin")
_UNPAIRED = ("label", "labels", "negative", "negatives", "negative_messages", "positive_messages")
_WEIGHTS = (
    *("weight", "weights", "sample_weight", "sample_weights", "loss_weight", "loss_weights", "loss_scale"),
    *("channel_weights", "advantage", "advantages"),
)
_MASKS = (
    *("loss_mask", "loss_masks", "label_mask", "labels_mask", "completion_mask", "assistant_mask", "assistant_masks"),
    *("train_on_input", "train_on_inputs", "train_on_prompt", "mask_history", "mask_prompt"),
)
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width", "detail")
_FRAMES = ("fps", "nframes", "num_frames", "min_frames", "max_frames", "total_pixels", "video_start", "video_end")
_WRITING = ("documents", "chat_template", "chat_template_kwargs", "enable_thinking", "reasoning_content", "channel")
_MODALITIES = ("input_features", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
_NOT_SUPPORTED = (*_UNPAIRED, *_WEIGHTS, *_MASKS, *_SIZES, *_FRAMES, *_WRITING, *_MODALITIES)

_OF_TOKENS = ("special_tokens_mask", "token_type_ids")
"""Lists as long as ``input_ids`` which tokenizers give and which say nothing where nothing is padded."""

_PATH = re.compile(rf"[^\n]{{1,4096}}\.({'|'.join(chain(*MEDIA_ENDINGS.values()))})", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://")
_BASE64 = re.compile(r"data:(image|video|audio)/|(/9j/|iVBORw0KGgo|R0lGOD|UklGR)[A-Za-z0-9+/=\s]{32}")
_FIRST_BYTES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|RIFF.{4}(WEBP|AVI |WAVE)|fLaC|ID3[\2-\4]|\xff[\xf2\xf3\xfa\xfb]"
    rb"|II\*\0|MM\0\*|.{4}ftyp|\0\0\0\x0cjP|\x1aE\xdf\xa3|OggS"
    rb"|FLV\x01|\x30\x26\xb2\x75|\0\0\x01[\xb3\xba]|P[1-7]\s|BM.{4}\0{4}",
    re.DOTALL,
)
"""Of files of images, videos and audio."""

_DEEPEST = 4
"""Levels of lists and objects in which a picture is looked for."""

_INSTEAD = "take it out, or say that it means nothing: FlowDataModule(ignore_columns=[{name!r}])"


def ignored_names(given: Collection[str]) -> frozenset[str]:
    """The names of fields that are as if they were not there.

    Raises:
        DataError: these are no names.
    """
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise DataError(f"ignore_columns is {given!r}; give a list of names: ignore_columns=['label', 'thumbnail'].")
    return frozenset(given)


def form_of(fields: Mapping[str, Any]) -> str | None:
    """The form of a record; None where it has none.

    Raises:
        NotUnderstoodError: it has two.
    """
    there = [form for form in FORMS if form in fields and (form != "prompt" or "completion" in fields)]
    filled = [form for form in there if not _is_empty(fields[form])]
    if len(filled) > 1:
        raise NotUnderstoodError(
            f"it holds {filled[0]!r} and {filled[1]!r}, of which one alone is learned; "
            f"take one out, or say which means nothing: FlowDataModule(ignore_columns=[{filled[1]!r}])"
        )
    return next(iter(filled or there), None)


def written_beside_turns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record's fields for the template beside its turns: ``tools``."""
    return {name: fields[name] for name in _WRITTEN if fields.get(name)}


def check_meaning(fields: Mapping[str, Any], form: str | None) -> None:
    """Refuses a record that says something of training which nothing here obeys.

    Raises:
        NotUnderstoodError: it does.
    """
    for name, value in _unread(fields, form):
        instead = _INSTEAD.format(name=name)
        if name in _PAIRS:
            raise NotUnderstoodError(f"it holds {name!r}; pairs are not trained yet: {instead}")
        if name in _NOT_SUPPORTED:
            raise NotUnderstoodError(f"it holds {name!r}, which is not supported; {instead}")
        if _are_turns(value):
            raise NotUnderstoodError(f"it holds {name!r}, turns which are not read; {instead}")
        if form == "input_ids" and name not in _OF_TOKENS and _are_as_many(value, fields["input_ids"]):
            raise NotUnderstoodError(
                f"it holds {name!r}, a number for each of the 'input_ids' which is not read (what is learned is said "
                f"by 'labels'); {instead}"
            )


def check_pictures(fields: Mapping[str, Any], form: str | None, read: Collection[str]) -> None:
    """Refuses a record with an image, a video or audio where none is looked for, so that it would be learned without.

    Args:
        fields: the record.
        form: its form.
        read: the names of the files that are read.

    Raises:
        NotUnderstoodError: it holds that.
    """
    names = {name.rpartition("/")[2] for name in read}
    for name, value in _unread(fields, form):
        found = _picture_in(value, names, _DEEPEST)
        if found:
            raise NotUnderstoodError(
                f"it holds {name!r} with {found}, which is not read; media are named as 'images', 'videos' and "
                f"'audios'. Name it so, {_INSTEAD.format(name=name)}"
            )


def _unread(fields: Mapping[str, Any], form: str | None) -> list[tuple[str, Any]]:
    read = (*_ALWAYS_READ, *(FORMS[form] if form else ()))
    return [(name, value) for name, value in fields.items() if name not in read and not _is_empty(value)]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes | list | dict) and not value)


def _are_turns(value: Any) -> bool:
    first = value[0] if isinstance(value, list) else None
    return isinstance(first, dict) and any(keys <= first.keys() for keys in ({"role", "content"}, {"from", "value"}))


def _are_as_many(value: Any, ids: Any) -> bool:
    return (
        isinstance(value, list)
        and isinstance(ids, list)
        and len(value) == len(ids) > 1
        and all(isinstance(number, int | float) for number in value)
        and value != list(range(len(ids)))  # positions, as they are counted anyhow
    )


def _picture_in(value: Any, read: Set[str], deep: int) -> str | None:
    """Says what of an image, a video or audio a value holds; None where it holds nothing."""
    if isinstance(value, bytes | bytearray):
        return "bytes of an image, a video or audio" if _FIRST_BYTES.match(value) else None
    if isinstance(value, str):
        return _picture_named(value, read)
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):  # as `datasets` writes them
            return "the bytes of a file"
        value = list(value.values())
    if isinstance(value, list | tuple):
        if deep == 0 or not value or isinstance(value[0], int | float):
            return None
        return next(filter(None, (_picture_in(held, read, deep - 1) for held in value)), None)
    is_array = getattr(value, "ndim", 0) >= 3 or type(value).__module__.partition(".")[0] == "PIL"
    return "a picture" if is_array else None


def _picture_named(value: str, read: Set[str]) -> str | None:
    if _BASE64.match(value):
        return "bytes of an image, a video or audio"
    # An address may ask for something behind its path, such as a size.
    forms = (value, re.split(r"[?#]", value, maxsplit=1)[0]) if "://" in value else (value,)
    if not any(map(_PATH.fullmatch, forms)) or {form.replace("\\", "/").rpartition("/")[2] for form in forms} & read:
        return None
    # Where images are read, an address of the web tells where they were found.
    return None if read and _ADDRESS.match(value) else f"the path {value[-60:]!r}"
