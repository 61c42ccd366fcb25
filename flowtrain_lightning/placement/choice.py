"""Which of the predicted allocations a run takes, and why, as one block of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flowtrain_lightning.allocator import Allocation, default_allocation
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.placement.prediction import Prediction

TELLABLE = 0.01
"""Predictions from measured costs that differ by less than this share count as equal; then the simpler placement is
taken."""

_SHOWN = 4
_TRIED_AT_ONCE = 12


@dataclass(frozen=True)
class Choice:
    """Predictions and the one that was chosen.

    Attributes:
        predictions: of every allocation that was looked at, the colocated one first.
        chosen: among them.
    """

    predictions: tuple[Prediction, ...]
    chosen: Prediction

    @property
    def why(self) -> str:
        """The reason, as a part of a sentence: the best of the other placement is what there is to compare with."""
        separate = self.chosen.allocation.placement == "separate"
        others = [each for each in self.predictions if (each.allocation.placement == "separate") != separate]
        if not others:
            return f"{split(self.chosen)} is the fastest of all that the steps and the devices allow"
        rival = min(others, key=lambda each: each.seconds)
        gap = 100 * (rival.seconds / self.chosen.seconds - 1)
        if gap < 0:
            return (
                f"{split(rival)} is predicted to be just {-gap:.1f} % faster than {split(self.chosen)}, and below "
                f"{100 * TELLABLE:.0f} % the simpler placement is taken"
            )
        told = f"{split(self.chosen)} is predicted to be {gap:.1f} % faster than {split(rival)}"
        if separate:
            return told
        encoder, backbone = (f"{100 * rival.idle[role]:.0f} %" for role in (ENCODER, BACKBONE))
        return f"{told}, where encoder ranks would be idle for {encoder} of a step and backbone ranks for {backbone}"

    def table(self) -> str:
        """The best predictions, a line each; the chosen one is marked."""
        best = sorted(self.predictions, key=lambda each: each.seconds)[:_SHOWN]
        shown = [each for each in self.predictions if each in best or each is self.chosen]
        lines = [f"  {'':24}{'s/step':>10}{'samples/s':>12}{'encoder idle':>15}{'backbone idle':>16}"]
        for each in shown:
            encoder, backbone = (f"{100 * each.idle[role]:.0f} %" for role in (ENCODER, BACKBONE))
            name = f"{'>' if each is self.chosen else ' '} {split(each)}"
            lines.append(f"{name:26}{each.seconds:>10.4g}{each.samples_per_second:>12.4g}{encoder:>15}{backbone:>16}")
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """What a logger keeps; in JSON types."""
        return {
            "predicted_step_seconds": self.chosen.seconds,
            "predicted_samples_per_second": self.chosen.samples_per_second,
            "predicted_encoder_idle": self.chosen.idle[ENCODER],
            "predicted_backbone_idle": self.chosen.idle[BACKBONE],
        }


def choose(ranks: int, predict: Callable[[Allocation], Prediction | None], nodes: int = 1) -> Choice:
    """Compare allocations of replicated roles, encoder ranks spread evenly over the nodes.

    On a few ranks these are all. On more, some numbers of encoder ranks are tried, then more of them about the
    best one, and so on: a thousand ranks take some forty predictions.

    Args:
        ranks: at least 2.
        predict: gives what an allocation takes, or None where the steps cannot be dealt to it.
        nodes: on which the ranks run, as many on each.

    Raises:
        ValueError: the steps cannot be dealt to any of them.
    """

    def separate(encoders: int) -> Prediction | None:
        return predict(default_allocation(ranks, "separate", encoders, ranks // nodes))

    together = predict(default_allocation(ranks, "colocated"))
    predictions = (*([together] if together is not None else []), *_search(ranks - 1, separate))
    if not predictions:
        raise ValueError(f"the steps cannot be dealt to {ranks} ranks in any way")
    fastest = min(predictions, key=lambda each: each.seconds)
    near = [each for each in predictions if each.seconds <= fastest.seconds * (1 + TELLABLE)]
    simplest = next((each for each in near if each.allocation.placement == "colocated"), fastest)
    return Choice(predictions, simplest)


def _search(most: int, predict: Callable[[int], Prediction | None]) -> list[Prediction]:
    """Predictions for numbers from 1 to ``most``, the closer together the closer to the best."""
    found: dict[int, Prediction] = {}
    low, high = 1, most
    while True:
        tried = sorted({round(float(number)) for number in np.geomspace(low, high, _TRIED_AT_ONCE)})
        if high - low < _TRIED_AT_ONCE:
            tried = list(range(low, high + 1))
        for first, following in pairwise([*tried, high + 1]):
            for number in range(first, following):  # where the steps cannot be dealt to it, the next one stands for it
                if number not in found and (prediction := predict(number)) is not None:
                    found[number] = prediction
                if number in found:
                    break
        if not found or len(tried) > high - low:
            return [found[number] for number in sorted(found)]
        best = min(found, key=lambda number: found[number].seconds)
        low = max((number for number in tried if number < best), default=low)
        high = min((number for number in tried if number > best), default=high)


def split(prediction: Prediction) -> str:
    """An allocation in two or three words, as in ``separate 1 + 3``: encoder and backbone ranks."""
    ranks = prediction.allocation.ranks
    if prediction.allocation.placement == "colocated":
        return f"colocated x{len(ranks[BACKBONE])}"
    return f"separate {len(ranks[ENCODER])} + {len(ranks[BACKBONE])}"
