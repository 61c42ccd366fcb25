"""One name for all that a frozen encoder's features follow from beside pixels: weights, settings, code, precision."""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import CodeType
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
_LIBRARIES = ("torch", "transformers", "timm", "flowtrain_lightning")

WeightsState = tuple[tuple[int, int], ...]
"""The address of each weight, and how often it was changed in place."""


def weights_state(module: HalvedModule, role: str) -> WeightsState:
    """Changes whenever somebody writes a half's weights, but through ``parameter.data``."""
    weights = (weight for half in _half(module, role) for weight in half.parameters())
    return tuple((weight.data_ptr(), weight._version) for weight in weights)


class EncoderFingerprints:
    """The fingerprints of a module's encoders.

    Weights are read again where they were changed. Settings are those of when an encoder was first asked for: what
    changes later is what its code counts.

    Args:
        module: holds them.
    """

    def __init__(self, module: HalvedModule) -> None:
        self._module = module
        self._weights: dict[str, tuple[WeightsState, str]] = {}
        self._settings: dict[str, str] = {}

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
        state = weights_state(self._module, role)
        if self._weights.get(role, (None, ""))[0] != state:
            self._weights[role] = state, _digest_of_weights(half)
        if role not in self._settings:
            parts = [part for path in self._module.halves[role] for part in _above_and_below(self._module, path)]
            code = [*_code_of(type(self._module), [type(part) for each in half for part in each.modules()])]
            self._settings[role] = fingerprint([[*map(_settings, parts)], _of_module(self._module), code])
        return fingerprint([self._weights[role][1], self._settings[role], str(computes)])


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
    """Settings of a module beside its weights: plain values, and a config of ``transformers``."""
    told: dict[str, object] = {
        name: value
        for name, value in sorted(vars(part).items())
        if isinstance(value, _PLAIN) and name not in ("training", "gradient_checkpointing")
    }
    if callable(to_dict := getattr(getattr(part, "config", None), "to_dict", None)):
        told["config"] = json.dumps(to_dict(), sort_keys=True, default=str)
    return [type(part).__qualname__, part.extra_repr(), told]


def _of_module(module: Any) -> dict[str, str]:
    """Plain values and hyperparameters of the user's module that the code of its ``encode`` names and does not set."""
    names, written = set[str](), set[str]()
    reached, left = set[str](), ["encode", "prepare_media"]
    while left:
        if (method := left.pop()) in reached:
            continue
        reached.add(method)
        if (code := _code_object(getattr(type(module), method, None))) is not None:
            named = {*_names_in(code)}
            names |= {name for name, _ in named}
            written |= {name for name, sets in named if sets}
            left += [name for name, _ in named if callable(getattr(type(module), name, None))]
    found: dict[str, str] = {}
    for name in sorted(names - written - set(dir(nn.Module))):
        value = getattr(module, name, None)
        if isinstance(value, _PLAIN) or name == "hparams":
            found[name] = repr(value)
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


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "lightning", "builtins", "typing", "abc")


@cache
def _source(kind: type) -> str:
    try:
        return file_fingerprint(Path(inspect.getfile(kind)))
    except (TypeError, OSError):  # written at a prompt: its code, in which numbers and names stand
        codes = [_code_object(value) for _, value in sorted(vars(kind).items())]
        return fingerprint([[code.co_code.hex(), repr(code.co_names)] for code in codes if code is not None])
