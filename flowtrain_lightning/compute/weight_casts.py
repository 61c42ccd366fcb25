"""Keeps autocast's casts of weights for a step, where Lightning has PyTorch cast them again in every forward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn


@cache
def casts_keep_gradients() -> bool:
    """Whether this PyTorch gives a weight its gradient where the cast was first made without gradients.

    Early versions do not: a forward under ``no_grad`` would leave a cast in the cache from which no gradient reaches
    the weight. It is tried out, since no version number says so.
    """
    # It may be asked for in an evaluation, where nothing else has gradients.
    with torch.inference_mode(False), torch.enable_grad():
        weight, row = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            with torch.no_grad():
                nn.functional.linear(row, weight)
            return bool(nn.functional.linear(row, weight).requires_grad)


class WeightCasts:
    """The casts of one rank's weights under ``precision="bf16-mixed"``; elsewhere it does nothing.

    Args:
        device_type: on which this rank computes.
    """

    def __init__(self, device_type: str) -> None:
        self._kind = device_type
        self._has_autocast = torch.amp.is_autocast_available(device_type)
        self._held = threading.local()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a weight is cast where it was not since `clear`. What is computed again in backwards knows that."""
        if not (self._is_on and casts_keep_gradients()):
            yield
            return
        dtype = torch.get_autocast_dtype(self._kind)
        with torch.autocast(self._kind, dtype=dtype, cache_enabled=True):
            yield

    def clear(self) -> None:
        """Drops all casts. To be called when a step ends, before its weights change."""
        if self._has_autocast:
            torch.clear_autocast_cache()

    def keep_in_backward(self, outputs: Iterable[Tensor]) -> None:
        """Lets layers that a backward computes again take casts from the forward, and leave them for the next one.

        PyTorch drops all casts where a thread leaves its outermost autocast. A GPU's backward runs in a thread of
        PyTorch's, in which every layer that is computed again is the outermost.

        Args:
            outputs: of which the backward begins.
        """
        if not self._is_on:
            return
        forward = threading.get_ident()

        def hold(_: Tensor) -> None:
            if threading.get_ident() != forward and not getattr(self._held, "is_held", False):
                torch.autocast_increment_nesting()  # for as long as that thread lives, which opens no other autocast
                self._held.is_held = True

        for output in outputs:
            output.register_hook(hold)  # type: ignore[no-untyped-call]

    @property
    def _is_on(self) -> bool:
        return self._has_autocast and torch.is_autocast_enabled(self._kind)
