"""Fields of turns, their parts and media: those obeyed, those that a template writes, those refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width", "detail")
_FRAMES = ("fps", "nframes", "num_frames", "min_frames", "max_frames", "total_pixels", "video_start", "video_end")

_LEARNED = ("weight", "loss")
"""Under which a turn may say that it is not learned."""

_NAMED = tuple(f"{kind}{end}" for kind in ("image", "video", "audio") for end in ("", "_url"))
_PART = frozenset({"type", "text", "path", "url", "bytes", "generate", *_NAMED})


class NotUnderstoodError(ValueError):
    """A record holds something that would change what is learned and that nothing here obeys; says what."""


def system_of(fields: Mapping[str, Any]) -> str | None:
    """The words of a record beside its turns that come first, as the system's.

    Raises:
        NotUnderstoodError: it is no text.
    """
    system = fields.get("system")
    if system is not None and not isinstance(system, str):
        raise NotUnderstoodError(f"its 'system' must be a string, but is a {type(system).__name__}")
    return system or None


def check_other_names(fields: Mapping[str, Any], kind: str) -> None:
    """Refuses a record in which no image or video was found, but which may name one where none is looked for.

    Args:
        fields: the record.
        kind: ``"image"``, ``"video"`` or ``"audio"``.

    Raises:
        NotUnderstoodError: it does, so that it would be learned without.
    """
    for name in (f"{kind}_{what}{end}" for what in ("path", "file", "url") for end in ("", "s")):
        if fields.get(name):
            raise NotUnderstoodError(f"it holds {name!r}, which is not read; name {kind}s as '{kind}s', or take it out")


def written_in_turn(turn: Mapping[str, Any], usual: tuple[str, str]) -> tuple[bool, dict[str, Any]]:
    """Whether a turn may be learned, and what it holds for the template to write beside its role and text.

    Args:
        turn: the turn.
        usual: the names of its role and its text.

    Raises:
        NotUnderstoodError: its weight is neither 0 nor 1.
    """
    learned = True
    known = (*usual, *_LEARNED)
    others = {name: value for name, value in turn.items() if name not in known and value not in (None, [], {})}
    for name in _LEARNED:
        given = turn.get(name)
        if given not in (None, 0, 1):
            raise NotUnderstoodError(f"a turn has {name}={given!r}; only 0 (not learned) and 1 are supported")
        learned &= given in (None, 1)
    return learned, others


def check_media(item: Any, kind: str) -> None:
    """Refuses what is said of one image or video and not obeyed, such as a size of its own.

    Args:
        item: as it stands in the data.
        kind: ``"image"``, ``"video"`` or ``"audio"``.

    Raises:
        NotUnderstoodError: it holds that.
    """
    said = {name: item.get(name) for name in (*_SIZES, *_FRAMES)} if isinstance(item, Mapping) else {}
    named = [name for name, value in said.items() if value is not None and (name, value) != ("detail", "auto")]
    if named:
        raise NotUnderstoodError(
            f"{'a' if kind == 'video' else 'an'} {kind} has {named[0]!r} of its own; all {kind}s follow one rule, so "
            "take it out and set the rule for all"
        )


def check_part(part: Mapping[str, Any]) -> None:
    """Refuses what a part of a content says and is not obeyed.

    Raises:
        NotUnderstoodError: it holds that.
    """
    kind = next((kind for kind in ("video", "audio") if str(part.get("type")).startswith(kind)), "image")
    check_media(part, kind)
    check_media(part.get(f"{kind}_url"), kind)
    unknown = sorted(
        name for name in part.keys() - _PART if part[name] is not None
    )  # tables name all keys of all parts
    if unknown:
        raise NotUnderstoodError(f"a part of a content has {unknown[0]!r}, which is not understood; take it out")
    generate = part.get("generate")
    if generate not in (None, False, True) or (generate and part.get("type") != "image"):
        raise NotUnderstoodError(
            f"a part of a content has generate={generate!r}; only an image may be generated: "
            "{'type': 'image', 'path': ..., 'generate': true}"
        )
