"""The two things that packers do: bins of a window, and the bins of one step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bins = list[list[int]]

WindowPacker = Callable[[Ints, int], Bins]
"""Tokens and budget to any number of bins."""

StepPacker = Callable[[Ints, Floats, int, int], Bins]
"""Tokens, costs, number of bins and budget to just so many bins."""
