"""How many producers a rank needs: what steps take to be made, over what they take to be trained on."""

from __future__ import annotations

import logging
import math
import time
from statistics import median

from flowtrain_lightning.data.batch import RankShard

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_FIRST_STEPS = 2
_MEASURED_STEPS = 8
_MOST = 64
"""Producers that are advised, at most: a rank that needs more hardly trains at all."""


class ProducerPace:
    """Tells once, after some steps, how many producers this rank needs for its own pace.

    Of ranks that do the same only the first tells it.

    Args:
        shard: what this rank holds of every step.
        producers: that it has.
    """

    def __init__(self, shard: RankShard, producers: int) -> None:
        self._roles = " and ".join(shard.own)
        self._producers = producers
        self._left = 0 if any(shard.own.values()) else _FIRST_STEPS + _MEASURED_STEPS
        self._given: float | None = None
        self._making: list[float] = []
        self._training: list[float] = []

    def asked(self) -> None:
        """The next step is asked for: the one before was trained on."""
        if self._left and self._given is not None:
            self._training.append(time.perf_counter() - self._given)

    def given(self, seconds: float | None, samples: int) -> None:
        """A step was given.

        Args:
            seconds: that a producer took to make it.
            samples: of the whole step.
        """
        if not self._left or seconds is None:
            return
        self._given = time.perf_counter()
        self._making.append(seconds)
        self._left -= 1
        if not self._left:
            self._tell(samples)

    def _tell(self, samples: int) -> None:
        making, training = (median(seconds[_FIRST_STEPS:]) for seconds in (self._making, self._training))
        needed = max(1, math.ceil(making / max(training, making / _MOST)))
        end = "which is enough." if needed <= self._producers else f"so it waits; num_workers={needed} would do."
        _log.info(
            f"flowtrain: a producer makes one {self._roles} rank's part of a step in {making:.3g} s "
            f"({1e3 * making / max(samples, 1):.3g} ms for each sample of the step), and the rank trains on it in "
            f"{training:.3g} s: for its pace it needs {needed} producers. It has {self._producers}, {end}"
        )
