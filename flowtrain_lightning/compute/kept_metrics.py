"""Keeps a user's own metrics of torchmetrics as they are while the module's methods run for nothing or once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torchmetrics import Metric

_COUNTED = ("_update_count", "_computed")
"""Beside its public states a metric counts its updates, by which means are weighed, and keeps its result."""


@contextmanager
def kept_metrics(module: Any) -> Iterator[None]:
    """Behind it, the states of all metrics of a module are as they were: trials, say, count for nothing."""
    kept = [
        (metric, {name: _copied(getattr(metric, name)) for name in (*metric.metric_state, *_COUNTED)})
        for metric in module.modules()
        if isinstance(metric, Metric)
    ]
    try:
        yield
    finally:
        for metric, states in kept:
            for name, state in states.items():
                setattr(metric, name, state)


def _copied(state: Any) -> Any:
    """A state as it is now; of a list, which may be long, the tensors that it holds, since metrics add others."""
    return list(state) if isinstance(state, list) else deepcopy(state)
