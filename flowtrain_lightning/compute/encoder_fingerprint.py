"""One name for all that a frozen encoder's features follow from beside pixels: weights, settings, code, precision."""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.compute.random_layers import dropout_settings
from flowtrain_lightning.data.features.feature_store import FeaturesNotKept
from flowtrain_lightning.data.fingerprint import file_fingerprint, fingerprint
from flowtrain_lightning.parallel.halves import HalvedModule

_PLAIN = (bool, int, float, str, type(None))
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DIGEST_THREADS = 8
_NOT_FOLLOWED = {"torch", "lightning", "transformers", "timm", *sys.stdlib_module_names}
"""Packages whose functions are told by their versions."""
_LIBRARIES = ("torch", "transformers", "timm", "flowtrain_lightning")

WeightsState = tuple[tuple[int, int], ...]
"""The address of each weight and buffer, and how often it was changed in place."""


def weights_state(module: HalvedModule, role: str) -> WeightsState:
    """Changes whenever somebody writes a half's weights or buffers, but through ``.data``."""
    tensors = (each for half in _half(module, role) for each in (*half.parameters(), *half.buffers()))
    return tuple((each.data_ptr(), each._version) for each in tensors)


class EncoderFingerprints:
    """The fingerprints of a module's encoders, from all that they hold when they are asked for.

    Args:
        module: holds them.
    """

    def __init__(self, module: HalvedModule) -> None:
        self._module = module

    def of(self, role: str, computes: object) -> str:
        """That of one encoder.

        Args:
            role: whose half it is.
            computes: where and in which precision.

        Raises:
            FeaturesNotKept: its features do not follow from the pixels alone.
        """
        half = _half(self._module, role)
        _refuse_what_changes(half)
        parts = [part for path in self._module.halves[role] for part in _above_and_below(self._module, path)]
        code = [*_code_of(type(self._module), [type(part) for each in half for part in each.modules()])]
        settings = [[*map(_settings, parts)], _of_module(self._module), code]
        return fingerprint([_digest_of_weights(half), settings, str(computes)])


def _half(module: HalvedModule, role: str) -> list[nn.Module]:
    return [module.get_submodule(path) for path in module.halves[role]]


def _refuse_what_changes(half: list[nn.Module]) -> None:
    for each in half:
        if any(weight.requires_grad for weight in each.parameters()):
            raise FeaturesNotKept(
                "it trains, so they are others after every step. Freeze it, self.encoder.requires_grad_(False), or "
                "leave keep_features out"
            )
        if any(isinstance(weight, DTensor) or weight.is_meta for weight in each.parameters()):
            raise FeaturesNotKept("this rank holds a part of its weights only. Give its ranks whole copies")
        for name, part in each.named_modules():
            if isinstance(part, _BATCH_NORM) and part.training:
                raise FeaturesNotKept(
                    f"its {type(part).__name__} {name!r} follows the other pictures of a batch. Put it into evaluation "
                    "mode when training begins: self.encoder.eval() in on_train_epoch_start"
                )
            if part.training and dropout_settings(part):
                raise FeaturesNotKept(
                    f"its {type(part).__name__} {name!r} draws random numbers. Put it into evaluation mode when "
                    "training begins: self.encoder.eval() in on_train_epoch_start"
                )


def _digest_of_weights(half: list[nn.Module]) -> str:
    tensors = [(name, each) for part in half for name, each in (*part.named_parameters(), *part.named_buffers())]
    with ThreadPoolExecutor(_DIGEST_THREADS) as threads:  # hashlib lets other threads run meanwhile
        digests = threads.map(lambda named: _digest(named[1]), tensors)
        return fingerprint([[name, digest] for (name, _), digest in zip(tensors, digests, strict=True)])


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    told = f"{tensor.dtype} {tuple(tensor.shape)};".encode()
    return hashlib.blake2b(told + hashlib.blake2b(content.data).digest(), digest_size=16).hexdigest()


def _above_and_below(module: HalvedModule, path: str) -> Iterator[nn.Module]:
    """The modules of a half, and those that hold it, whose settings often decide which layer is taken."""
    names = path.split(".")
    for depth in range(1, len(names)):
        yield module.get_submodule(".".join(names[:depth]))
    yield from module.get_submodule(path).modules()


def _settings(part: Any) -> list[object]:
    """Settings of a module beside its weights: what it holds but counts, and a config of ``transformers``."""
    kind: type = type(part)
    left_out = {*vars(nn.Module()), "gradient_checkpointing", "config", *_counted(kind)}
    told: dict[str, object] = {
        name: _content(value)
        for name, value in sorted(vars(part).items())
        if name not in left_out and not isinstance(value, nn.Module)
    }
    if callable(to_dict := getattr(getattr(part, "config", None), "to_dict", None)):
        told["config"] = json.dumps(to_dict(), sort_keys=True, default=str)
    return [type(part).__qualname__, part.extra_repr(), told]


@cache
def _counted(kind: type) -> frozenset[str]:
    """Names that a layer's forward sets: what it counts, or keeps for its own use."""
    return frozenset(name for name, sets in _named_from(kind, ["forward"]) if sets)


def _named_from(kind: type, methods: list[str]) -> set[tuple[str, bool]]:
    """Names in methods of a class, and in those of its methods that they name; and whether these set them."""
    found, reached, left = set[tuple[str, bool]](), set[str](), list(methods)
    while left:
        if (method := left.pop()) in reached:
            continue
        reached.add(method)
        if (code := _code_object(getattr(kind, method, None))) is not None:
            named = {*_names_in(code)}
            found |= named
            left += [name for name, _ in named if callable(getattr(kind, name, None))]
    return found


def _content(value: Any) -> object:
    """A value in JSON types, which changes where the value does."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _digest(value)
    if isinstance(value, Mapping):
        return sorted([repr(_content(key)), _content(each)] for key, each in value.items())
    if isinstance(value, list | tuple):
        return [_content(each) for each in value]
    if (code := _code_object(value)) is not None:
        within = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return [*_code_content(code), _content(within)]
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


def _of_module(module: Any) -> dict[str, str]:
    """Values and hyperparameters of the user's module that the code of its ``encode`` names and does not set."""
    named = _named_from(type(module), ["encode", "prepare_media"])
    names, written = {name for name, _ in named}, {name for name, sets in named if sets}
    found: dict[str, str] = {}
    for name in sorted(names - written - set(dir(nn.Module))):
        value = getattr(module, name, None)
        if name == "hparams":
            found[name] = repr(value)
        elif not isinstance(value, nn.Module) and name in vars(module):
            found[name] = repr(_content(value))
    return found


def _code_object(method: Any) -> CodeType | None:
    code: CodeType | None = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    return code


def _names_in(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Names of attributes and globals, and whether the code sets them: what it counts, say."""
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, str) and instruction.argval in code.co_names:
            yield instruction.argval, instruction.opname.startswith("STORE")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _code_of(module: type, parts: list[type]) -> Iterator[tuple[str, str]]:
    """The files in which the user's class and the layers are written, by content; and versions of libraries."""
    for name in _LIBRARIES:
        if name in sys.modules:
            yield name, str(getattr(sys.modules[name], "__version__", ""))
    written = {each for kind in (module, *parts) for each in kind.__mro__ if not _is_of_a_library(each)}
    for kind in sorted(written, key=lambda each: (each.__module__, each.__qualname__)):
        yield kind.__qualname__, _source(kind)
        yield from _named_functions(kind)


@cache
def _named_functions(kind: type) -> tuple[tuple[str, str], ...]:
    """The functions outside of libraries that methods name, and those that these name; each with its code."""
    found: dict[str, str] = {}
    left = [method for _, method in sorted(vars(kind).items()) if _code_object(method) is not None]
    while left:
        function = inspect.unwrap(left.pop())
        names, known = {name for name, _ in _names_in(function.__code__)}, getattr(function, "__globals__", {})
        named = [known.get(name) for name in sorted(names)]
        inside = [vars(each).get(name) for each in named if isinstance(each, ModuleType) for name in sorted(names)]
        for each in (*named, *inside):
            if isinstance(each, FunctionType) and each.__module__.partition(".")[0] not in _NOT_FOLLOWED:
                name = f"{each.__module__}.{each.__qualname__}"
                if name not in found:
                    found[name] = fingerprint(_content(each))
                    left.append(each)
    return tuple(sorted(found.items()))


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "lightning", "builtins", "typing", "abc")


@cache
def _source(kind: type) -> str:
    try:
        return file_fingerprint(Path(inspect.getfile(kind)))
    except (TypeError, OSError):  # written at a prompt: its code, in which numbers and names stand
        codes = [_code_object(value) for _, value in sorted(vars(kind).items())]
        return fingerprint([[code.co_code.hex(), repr(code.co_names)] for code in codes if code is not None])
