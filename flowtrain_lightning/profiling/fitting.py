"""The cost model of a half from its measured times, without terms that the times do not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation, fit_cost, predict

_TELLABLE = 0.005
"""Mean relative errors that differ by less are alike: times differ by more from run to run."""


def plainest_cost(measured: Sequence[Observation]) -> CostModel:
    """The best cost model, or the best one without a quadratic term where that explains the times as well.

    Where all lengths are nearly alike, as those of pictures that are scaled to one size, the sum of their squares is as
    good as a multiple of their sum. Which of the two explains the times would be chance, and a model that had lost its
    linear term would be wrong for every other length. Then all goes to the linear term.

    Args:
        measured: at least 3 sizes; none where the half has no work.
    """
    if not measured:
        return CostModel(0.0, 0.0, 0.0)
    whole = fit_cost(measured)
    plain = fit_cost([replace(item, squares=0.0) for item in measured])
    return plain if _mean_error(plain, measured) <= _mean_error(whole, measured) + _TELLABLE else whole


def _mean_error(cost: CostModel, measured: Sequence[Observation]) -> float:
    return float(np.mean([abs(predict(cost, item) / item.seconds - 1) for item in measured]))
