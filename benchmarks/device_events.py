"""How long a GPU takes for a piece of work, by its own events."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_WARM_UP, _SAMPLES = 3, 10


def median_milliseconds(work: Callable[[], Any]) -> float:
    """Of a piece of work on the current GPU, a median of ten, by events that are read at the end."""
    for _ in range(_WARM_UP):
        work()
    marks = []
    for _ in range(_SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()  # type: ignore[no-untyped-call]
        work()
        end.record()  # type: ignore[no-untyped-call]
        marks.append((begin, end))
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in marks))
