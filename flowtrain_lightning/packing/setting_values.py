"""Refuses impossible values of settings where they are given, in a sentence: wrong types, NaN, numbers too low."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_settings(
    settings: Any,
    *,
    least: Mapping[str, float] | None = None,
    above: Mapping[str, float] | None = None,
    error: type[ValueError] = ValueError,
) -> None:
    """Check all fields of a dataclass by their types; called in its ``__post_init__``.

    Args:
        settings: the dataclass.
        least: field -> the least number that it may be.
        above: field -> the number that it must exceed.
        error: what is raised.

    Raises:
        ValueError: names the field, its value, and what it may be.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        bounds = ((least or {}).get(field.name), (above or {}).get(field.name))
        check_setting(
            type(settings).__name__, field.name, getattr(settings, field.name), hints[field.name], *bounds, error
        )


def check_setting(
    owner: str,
    name: str,
    value: Any,
    hint: Any,
    least: float | None = None,
    above: float | None = None,
    error: type[ValueError] = ValueError,
) -> None:
    """Check one value.

    Args:
        owner: the class that it is a setting of.
        name: of the setting.
        value: what was given.
        hint: its type, as in an annotation: of numbers, truth values, strings, literals, classes, tuples, mappings and
            unions.
        least: the least number that it may be.
        above: the number that it must exceed.
        error: what is raised.

    Raises:
        ValueError: names the setting, its value, and what it may be.
    """
    if not _is_allowed(value, hint, least, above):
        raise error(f"{owner} got {name}={value!r}; give {_allowed(hint, least, above)}.")


def _is_allowed(value: Any, hint: Any, least: float | None, above: float | None) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_allowed(value, part, least, above) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is tuple:
        right_length = parts[-1] is Ellipsis or (isinstance(value, Sequence) and len(value) == len(parts))
        is_series = isinstance(value, Sequence) and not isinstance(value, str)
        return is_series and right_length and all(_is_allowed(each, parts[0], least, above) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is_allowed(each, parts[1], least, above) for each in value.values())
    if hint in (int, float):
        is_number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        in_bounds = is_number and (least is None or value >= least) and (above is None or value > above)
        return bool(in_bounds and math.isfinite(value))
    return isinstance(value, origin or hint)


def _allowed(hint: Any, least: float | None, above: float | None) -> str:
    """Says in words what a hint allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(part, least, above) for part in parts)
    if origin is Literal:
        *others, last = map(repr, parts)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        count = "any number of" if parts[-1] is Ellipsis else str(len(parts))
        return f"a tuple of {count} numbers, each {_allowed(parts[0], least, above)}"
    if origin is Mapping:
        return f"a dictionary from names to {_allowed(parts[1], least, above)}"
    bound = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
    words = {int: f"a whole number{bound}", float: f"a finite number{bound}", bool: "True or False", NoneType: "None"}
    return words.get(hint) or f"a {getattr(origin or hint, '__name__', hint)}"
