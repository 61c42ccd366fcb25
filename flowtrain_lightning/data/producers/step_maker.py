"""What a producer does on a node of Ray: it makes a rank's steps from what the rank sent, or refuses to."""

from __future__ import annotations

import os
import pickle
import platform
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.data.loading.freed_memory import keep_freed_memory
from flowtrain_lightning.data.loading.workers import PackedParts

_DECISIVE = (
    "flowtrain-lightning",
    "numpy",
    "torch",
    "pillow",
    "tokenizers",
    "transformers",
    "av",
    "pyarrow",
    "datasets",
    "soundfile",
)
"""Packages that decide what becomes of a record."""


class StepsOrigin(NamedTuple):
    """A rank's steps, for its producers.

    Attributes:
        folder: in which paths are given.
        versions: of packages in the rank.
        steps: pickled, since what they are made of is there only where the folder is.
    """

    folder: str
    versions: Mapping[str, str]
    steps: bytes


class MadeStep(NamedTuple):
    """What a rank is told of a step, beside the bytes of its tensors.

    Attributes:
        parts: the step without its tensors; None where the stream has ended.
        seconds: that it took to make it.
    """

    parts: PackedParts | None
    seconds: float


class FailedStep(NamedTuple):
    """Why there is no step.

    Attributes:
        error: what was raised; None where it cannot be sent.
        told: where, in words.
    """

    error: Exception | None
    told: str


class StepMaker:
    """Makes the steps of one rank. Errors are results, which the rank raises.

    Args:
        origin: a pickled :class:`StepsOrigin`.
    """

    def __init__(self, origin: bytes) -> None:
        self._origin: StepsOrigin = pickle.loads(origin)
        self._steps: StepDataset | None = None

    def make(self, key: bytes) -> tuple[bytes, int, Sequence[int], Sequence[Any]]:
        """A step.

        Args:
            key: its epoch, number and packing, pickled.

        Returns:
            a pickled :class:`MadeStep` or :class:`FailedStep`; the bytes of its tensors together; where each begins;
            and the tensors, ``[bytes]`` uint8.
        """
        began = time.perf_counter()
        try:
            if self._steps is None:
                self._steps = self._opened()
            parts = self._steps.parts(*pickle.loads(key))
        except Exception as error:
            return pickle.dumps(_failed(error)), 0, (), ()
        tensors = [] if parts is None else [each.reshape(-1).view(torch.uint8).numpy() for each in parts.tensors]
        offsets = [] if parts is None else [offset for offset, _, _ in parts.layout]
        left = None if parts is None else parts._replace(tensors=())
        nbytes = 0 if parts is None else parts.nbytes
        return pickle.dumps(MadeStep(left, time.perf_counter() - began)), nbytes, offsets, tensors

    def _opened(self) -> StepDataset:
        """The rank's steps; first what would make them others is refused.

        Raises:
            DataError: this node has other versions, or not the folder.
        """
        own, ranks = versions(), self._origin.versions
        if unlike := [name for name in own if own[name] != ranks.get(name)]:
            told = ", ".join(f"{name} {own[name] or 'none'} (rank: {ranks.get(name) or 'none'})" for name in unlike)
            raise DataError(
                f"The producer on {platform.node()} would make other steps than the rank, since it has {told}. Install "
                "the same versions on all nodes of the Ray cluster."
            )
        try:
            os.chdir(self._origin.folder)
        except OSError as error:
            raise DataError(
                f"The producer on {platform.node()} cannot read what the rank reads: {error}. All nodes of the Ray "
                "cluster must have the same folders."
            ) from error
        torch.set_num_threads(1)
        keep_freed_memory()
        steps: StepDataset = pickle.loads(self._origin.steps)
        return steps


def _failed(error: Exception) -> FailedStep:
    told = f"In a producer on {platform.node()}:\n{''.join(traceback.format_exception(error))}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FailedStep(None, told)
    return FailedStep(error, told)


def versions() -> dict[str, str]:
    """Package -> its version here, without the part that names processors; empty if it is not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _DECISIVE:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = ""
    return found
