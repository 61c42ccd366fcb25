"""The random states of a rank, as plain data: what user code draws goes on after a resume as if never interrupted."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of torch (CPU and this rank's GPU), Python's ``random`` and numpy."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, list(numbers), gauss),
        "numpy": (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Takes up what ``random_states`` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
