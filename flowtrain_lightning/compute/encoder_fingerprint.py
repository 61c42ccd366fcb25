"""One name for all that a frozen encoder's features follow from beside pixels: weights, settings, code, precision."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.compute.bound_to_step import bound_to_step
from flowtrain_lightning.compute.random_layers import dropout_settings
from flowtrain_lightning.data.features.feature_store import FeaturesNotKept
from flowtrain_lightning.data.features.written_code import code_of, content_of, digest_of, names_from
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.parallel.halves import HalvedModule

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DIGEST_THREADS = 8
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

    def of(self, role: str, computes: object, data: object = None, callbacks: Iterable[object] = ()) -> str:
        """That of one encoder.

        Args:
            role: whose half it is.
            computes: where and in which precision.
            data: the data module, if there is one.
            callbacks: of the Trainer.

        Raises:
            FeaturesNotKept: its features do not follow from the pixels alone.
        """
        half = _half(self._module, role)
        _refuse_what_changes(half)
        if (bound := bound_to_step(self._module, data, callbacks)) is not None:
            raise FeaturesNotKept(bound)
        parts = [part for path in self._module.halves[role] for part in _above_and_below(self._module, path)]
        code = [*_versions(), *code_of([type(self._module), *(type(part) for each in half for part in each.modules())])]
        settings = [[*map(_settings, parts)], _of_module(self._module), code]
        return fingerprint([_digest_of_weights(half), settings, str(computes)])


def _versions() -> Iterator[tuple[str, str]]:
    """The libraries of which something may be computed."""
    for name in _LIBRARIES:
        if name in sys.modules:
            yield name, str(getattr(sys.modules[name], "__version__", ""))


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
        digests = threads.map(lambda named: digest_of(named[1]), tensors)
        return fingerprint([[name, digest] for (name, _), digest in zip(tensors, digests, strict=True)])


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
        name: content_of(value)
        for name, value in sorted(vars(part).items())
        if name not in left_out and not isinstance(value, nn.Module)
    }
    if callable(to_dict := getattr(getattr(part, "config", None), "to_dict", None)):
        told["config"] = json.dumps(to_dict(), sort_keys=True, default=str)
    return [type(part).__qualname__, part.extra_repr(), told]


@cache
def _counted(kind: type) -> frozenset[str]:
    """Names that a layer's forward sets: what it counts, or keeps for its own use."""
    return frozenset(name for name, sets in names_from(kind, ["forward"]) if sets)


def _of_module(module: Any) -> dict[str, str]:
    """Values and hyperparameters of the user's module that the code of its ``encode`` names and does not set."""
    named = names_from(type(module), ["encode", "prepare_media"])
    names, written = {name for name, _ in named}, {name for name, sets in named if sets}
    found: dict[str, str] = {}
    for name in sorted(names - written - set(dir(nn.Module))):
        value = getattr(module, name, None)
        if name == "hparams":
            found[name] = repr(value)
        elif not isinstance(value, nn.Module) and name in vars(module):
            found[name] = repr(content_of(value))
    return found
