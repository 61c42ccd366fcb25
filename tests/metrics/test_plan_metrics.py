"""Metrics of steps against sums by hand, and the FLOPs of a real module against the planner's formulas."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator import ROLES
from flowtrain_lightning.metrics import FlopUtilization, PackingUse, Throughput
from flowtrain_lightning.packing import CostModel, SampleSizes, StepPlan
from flowtrain_lightning.placement.profile import FlopModel

NOTHING = CostModel(0.0, 0.0, 0.0)
FLOPS = {
    "encoder": FlopModel(CostModel(2.0, 1.0, 0.0), NOTHING),  # frozen
    "backbone": FlopModel(CostModel(10.0, 1.0, 0.0), CostModel(20.0, 2.0, 0.0)),
}
PEAK = 1000.0


def plan() -> StepPlan:
    """Four samples of an image each on two backbone ranks, one of which has an empty microbatch, and an encoder."""
    tokens, patches = np.array([30, 40, 50, 60]), np.array([8, 4, 2, 1])
    sizes = SampleSizes(tokens, tokens // 2, np.arange(5), patches // 4 + 1, patches)
    microbatches = ((np.array([0, 1]), np.array([2])), (np.array([3]), np.array([], dtype=np.int64)))
    return StepPlan(np.arange(4), sizes, {"backbone": microbatches, "encoder": ((np.array([0, 3]), np.array([1, 2])),)})


def test_throughput_counts_all_that_all_ranks_do_in_the_time_of_their_steps():
    metric = Throughput()
    for seconds in (1.5, 2.5):
        metric.update(plan(), seconds)
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == {"samples_per_second": 2.0, "tokens_per_second": 90.0, "media_items_per_second": 2.0}


def test_utilization_counts_every_sequence_by_itself_and_only_what_is_computed():
    metric = FlopUtilization(FLOPS, {"encoder": (2,), "backbone": (0, 1)}, PEAK)
    metric.update(plan(), 10.0)
    backbone = 30 * 180 + 3 * (30**2 + 40**2 + 50**2 + 60**2)
    encoder = 2 * 15 + (8**2 + 4**2 + 2**2 + 1**2)
    found = metric.compute()
    assert float(found["backbone"]) == pytest.approx(backbone / (10 * PEAK * 2))
    assert float(found["encoder"]) == pytest.approx(encoder / (10 * PEAK))
    assert float(found["all"]) == pytest.approx((backbone + encoder) / (10 * PEAK * 3))


def test_ranks_with_both_roles_count_once_in_all():
    metric = FlopUtilization(FLOPS, {"encoder": (0, 1), "backbone": (0, 1)}, PEAK)
    metric.update(plan(), 10.0)
    found = metric.compute()
    assert float(found["all"]) == pytest.approx(float(found["encoder"] + found["backbone"]))


def packing_use(pads):
    return PackingUse(100, pads, dict.fromkeys(ROLES, CostModel(1.0, 0.0, 0.0)))


@pytest.mark.parametrize(("pads", "padding"), [(True, 1 - 180 / 300), (False, 0.0)])
def test_fill_and_padding_are_shares_of_the_budgets_of_microbatches_with_samples(pads, padding):
    metric = packing_use(pads)
    metric.update(plan(), 1.0)
    found = metric.compute()
    assert float(found["fill"]) == pytest.approx(180 / 300)
    assert float(found["padding"]) == pytest.approx(padding)


def test_imbalance_is_what_the_busiest_rank_has_more_than_the_average_one():
    metric = packing_use(pads=False)
    for _ in range(2):
        metric.update(plan(), 1.0)
    found = metric.compute()
    assert float(found["backbone_imbalance"]) == pytest.approx(120 / 90 - 1)
    assert float(found["encoder_imbalance"]) == 0.0


def test_after_a_reset_only_later_steps_count():
    metric = Throughput()
    metric.update(plan(), 100.0)
    metric.reset()
    metric.update(plan(), 1.0)
    assert float(metric.compute()["samples_per_second"]) == 4.0
