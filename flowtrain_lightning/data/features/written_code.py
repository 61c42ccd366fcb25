"""Names for code and values that the features of an encoder follow from: other code, other name."""

from __future__ import annotations

import dis
import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.data.fingerprint import file_fingerprint, fingerprint

_PLAIN = (bool, int, float, str, type(None))
_NOT_FOLLOWED = {"torch", "lightning", "transformers", "timm", *sys.stdlib_module_names}
"""Packages whose functions are told by their versions."""


def digest_of(tensor: Tensor) -> str:
    """A name of a tensor's numbers, dtype and shape."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    told = f"{tensor.dtype} {tuple(tensor.shape)};".encode()
    return hashlib.blake2b(told + hashlib.blake2b(content.data).digest(), digest_size=16).hexdigest()


def content_of(value: Any) -> object:
    """A value in JSON types, which changes where the value does."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return digest_of(value)
    if isinstance(value, Mapping):
        return sorted([repr(content_of(key)), content_of(each)] for key, each in value.items())
    if isinstance(value, list | tuple):
        return [content_of(each) for each in value]
    if (code := code_object(value)) is not None:
        within = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return [*_code_content(code), content_of(within)]
    try:
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest()
    except Exception:  # whatever objects do that are not made to be pickled
        return type(value).__qualname__


def _code_content(code: CodeType) -> list[object]:
    constants = [
        _code_content(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return [code.co_code.hex(), repr(code.co_names), constants]


def code_object(method: Any) -> CodeType | None:
    """The code of a function or method; None where it has none."""
    code: CodeType | None = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    return code


def names_in(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Names of attributes and globals, and whether the code sets them: what it counts, say."""
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, str) and instruction.argval in code.co_names:
            yield instruction.argval, instruction.opname.startswith("STORE")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def names_from(kind: type, methods: Iterable[str]) -> set[tuple[str, bool]]:
    """Names in methods of a class, and in its methods and properties that they name; and whether these set them."""
    found, reached, left = set[tuple[str, bool]](), set[str](), list(methods)
    while left:
        if (method := left.pop()) in reached:
            continue
        reached.add(method)
        for code in _codes_of(kind, method):
            named = {*names_in(code)}
            found |= named
            left += [name for name, _ in named]
    return found


def _codes_of(kind: type, name: str) -> Iterator[CodeType]:
    """The code of a method or property of a class, and of those that it has from `super`."""
    for owner in (each for each in kind.__mro__ if name in vars(each)):
        written = vars(owner)[name]
        if isinstance(written, property | cached_property):
            if is_of_a_library(owner):  # such as that of the Trainer, which leads to all of it
                return
            written = written.fget if isinstance(written, property) else written.func
        if (code := code_object(getattr(written, "__func__", written))) is None:
            return
        yield code
        if "super" not in code.co_names:
            return


def code_of(kinds: Iterable[type]) -> Iterator[tuple[str, str]]:
    """Names of the code of classes: the files in which they and their bases are written, and what these name elsewhere.

    Args:
        kinds: the classes.
    """
    written = {each for kind in kinds for each in kind.__mro__ if not is_of_a_library(each)}
    for kind in sorted(written, key=lambda each: (each.__module__, each.__qualname__)):
        yield kind.__qualname__, _source(kind)
        yield from _named_outside(kind)


@cache
def _named_outside(kind: type) -> tuple[tuple[str, str], ...]:
    """What methods name outside of libraries, and what functions among these name; all by content."""
    found: dict[str, str] = {}
    left = [method for _, method in sorted(vars(kind).items()) if code_object(method) is not None]
    while left:
        function = inspect.unwrap(left.pop())
        for name, each in _globals_of(function):
            if isinstance(each, FunctionType | type) and each.__module__.partition(".")[0] not in _NOT_FOLLOWED:
                name = f"{each.__module__}.{each.__qualname__}"
                if name not in found:
                    found[name] = _source(each)
                    left += [each] if isinstance(each, FunctionType) else []
            elif isinstance(each, (bool, int, float, str, tuple, Tensor)):
                found[f"{function.__module__}: {name}"] = fingerprint(content_of(each))
    return tuple(sorted(found.items()))


def _globals_of(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function names outside of itself, also within modules, and does not set."""
    named = {*names_in(function.__code__)}
    names = sorted({name for name, _ in named} - {name for name, sets in named if sets})
    known = getattr(function, "__globals__", {})
    for name in (each for each in names if each in known and not each.startswith("__")):
        yield name, known[name]
        if isinstance(known[name], ModuleType):
            yield from ((f"{name}.{each}", vars(known[name])[each]) for each in names if each in vars(known[name]))


def is_of_a_library(kind: type) -> bool:
    """Whether a class is none that a user, or this package, has written."""
    return kind.__module__.partition(".")[0] in ("torch", "lightning", "builtins", "typing", "abc")


@cache
def _source(written: type | FunctionType) -> str:
    """The file in which a class or a function is written, by content: what it names there counts as well."""
    try:
        return file_fingerprint(Path(inspect.getfile(written)))
    except (TypeError, OSError):  # written at a prompt: its code, in which numbers and names stand
        of_class = [value for _, value in sorted(vars(written).items())]
        codes = map(code_object, of_class if isinstance(written, type) else [written])
        return fingerprint([_code_content(code) for code in codes if code is not None])
