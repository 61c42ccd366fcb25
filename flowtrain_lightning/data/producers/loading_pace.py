"""How long a rank waits for its steps, and how many producers would make them at its own pace."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from statistics import median
from typing import NamedTuple

from flowtrain_lightning.data.batch import RankShard

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_FIRST_STEPS = 2
_MEASURED_STEPS = 8
_KEPT_STEPS = 32
"""From which the share of waiting follows: the last ones."""

_LEAST_WAITING = 0.05
"""Share of a rank's time below which its loader is no bottleneck."""

_MOST = 64
"""Producers that are advised, at most: a rank that needs more hardly trains at all."""


class _Step(NamedTuple):
    """Seconds of one step: waited for it, trained on the one before it, and made by a producer, if one did."""

    waiting: float
    training: float
    making: float | None


class LoadingPace:
    """Measures what a rank's loader makes it wait.

    After some steps it tells once how many producers the rank needs. Of ranks that do the same only the first tells it.

    Args:
        shard: what this rank holds of every step.
        producers: that it has; None where its own processes load.
    """

    def __init__(self, shard: RankShard, producers: int | None = None) -> None:
        self._roles = " and ".join(shard.own)
        self._producers = producers
        self._left = 0 if producers is None or any(shard.own.values()) else _FIRST_STEPS + _MEASURED_STEPS
        self._seen = 0
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._asked = self._given = 0.0

    def asked(self) -> None:
        """The next step is asked for: the one before was trained on."""
        self._asked = time.perf_counter()

    def given(self, seconds: float | None, samples: int) -> None:
        """A step was given.

        Args:
            seconds: that a producer took to make it; None where none did.
            samples: of the whole step.
        """
        former, self._given = self._given, time.perf_counter()
        self._seen += 1
        if self._seen <= _FIRST_STEPS:
            return
        self._steps.append(_Step(self._given - self._asked, self._asked - former, seconds))
        if self._left and self._seen >= self._left:
            self._left = 0
            self._tell(samples)

    @property
    def waiting(self) -> float:
        """The share of its time, of the last steps, in which the rank waited for its loader."""
        waited = sum(step.waiting for step in self._steps)
        return waited / max(waited + sum(step.training for step in self._steps), 1e-9)

    @property
    def missing(self) -> int:
        """How many more producers would make steps as fast as the rank trains on them; 0 where none load."""
        return 0 if self._producers is None else max(0, self._needed() - self._producers)

    @property
    def bottleneck(self) -> tuple[str, str] | None:
        """Whom the rank waits for, and how much, in words; None where it hardly waits."""
        if len(self._steps) < 2 or self.waiting < _LEAST_WAITING:
            return None
        share = f"{100 * self.waiting:.0f} %"
        if self._producers is None:
            return "waits for data", share
        return "waits for producers", f"{share}: {self.missing} more would do" if self.missing else share

    def metrics(self, name: str) -> dict[str, float]:
        """Figures for loggers, of a rank of this name: those of `waiting` and `missing`."""
        told = {"waiting": self.waiting} | ({} if self._producers is None else {"missing producers": self.missing})
        return {f"data/{name} {what}": float(value) for what, value in told.items()}

    def _making(self) -> float:
        return median([step.making for step in self._steps if step.making is not None] or [0.0])

    def _training(self) -> float:
        return median([step.training for step in self._steps] or [0.0])

    def _needed(self) -> int:
        making = self._making()
        return max(1, math.ceil(making / max(self._training(), making / _MOST, 1e-9)))

    def _tell(self, samples: int) -> None:
        making, needed = self._making(), self._needed()
        end = f"so it waits; num_workers={needed} would do." if self.missing else "which is enough."
        _log.info(
            f"flowtrain: a producer makes one {self._roles} rank's part of a step in {making:.3g} s "
            f"({1e3 * making / max(samples, 1):.3g} ms for each sample of the step), and the rank trains on it in "
            f"{self._training():.3g} s: for its pace it needs {needed} producers. It has {self._producers}, {end}"
        )
