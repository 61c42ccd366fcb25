"""Plans are the same bits today as when their digests were written down; whoever means to change them writes new ones.

Costs are sums of powers of two, so that no machine rounds them otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.offline import OfflineSettings, pack_offline
from flowtrain_lightning.packing.policies.forwards_first import recomputed_batches
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import make_sizes, members_of

COST, ENCODER_COST = CostModel(1.0, 1 / 4096, 0.0), CostModel(0.25, 0.0, 0.0)
TOKEN_BUDGET = 4096
BACKBONE_RANKS, ENCODER_RANKS = 4, 2


def digest(arrays: Iterable[object]) -> str:
    return hashlib.sha256(repr([np.asarray(array).tolist() for array in arrays]).encode()).hexdigest()[:16]


def texts_and_pictures(count: int):
    """Text tokens and rows of features of samples of many lengths, in a pattern without random numbers."""
    for number in range(count):
        text = 20 + number * number * 7919 % (900 if number % 5 else 3000)
        yield text, [100 + number * 31 % 400] * (number % 3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "00ab3875195151e9"),
        ({"sync_every": "step"}, "018e0670b5ada7a2"),
        ({"media_costs": {"encoder": ENCODER_COST}}, "a7b829b4e7081343"),
        ({"media_costs": {"encoder": ENCODER_COST}, "sync_every": "step"}, "bdf4dd1f90a6779b"),
        ({"encoders": BACKBONE_RANKS, "local": True}, "0a65f779ac2165dd"),
        ({"colocated": ((0, 1), (1, 2))}, "ca4447fc7a03555e"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "defaults",
)
def test_a_step_of_texts_and_pictures(settings, expected):
    sizes = make_sizes(*texts_and_pictures(120))
    members = {"encoders": ENCODER_RANKS, "backbones": BACKBONE_RANKS}
    members |= {name: value for name, value in settings.items() if name in ("encoders", "local", "colocated")}
    others = {name: value for name, value in settings.items() if name not in members}
    plan = plan_step(sizes, np.arange(120), members_of(**members), token_budget=TOKEN_BUDGET, cost=COST, **others)
    arrays = [array for of_rank in (*plan.microbatches, *plan.batches["encoder"]) for array in of_rank]
    recomputed = [sorted(of_rank) for kept in (0, 1, 2) for of_rank in recomputed_batches(plan, kept)["encoder"]]
    assert digest([*arrays, *recomputed]) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"global_batch_size": 9}, "bc8b30fc16e0f2f0"),
        ({"global_batch_size": 100, "sync_every": "step"}, "9ba3d0d1b085bce4"),
        ({"microbatches": 2}, "d77225e743cd6666"),
        ({"microbatches": 2, "sync_every": "step", "balance_group": 2}, "d69ca6e568f4d2ad"),
        ({"microbatches": 2, "token_budget": 40_000}, "18000bd1826e1488"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "defaults",
)
def test_a_data_set_of_texts_and_pictures(settings, expected):
    sizes = make_sizes(*texts_and_pictures(2000))
    given = {"token_budget": TOKEN_BUDGET, "ranks": BACKBONE_RANKS, "cost": COST, **settings}
    media_cost = ENCODER_COST.of_each(sizes.media_patches)
    options = OfflineSettings(**given, encoder_ranks=ENCODER_RANKS)
    plan = pack_offline(sizes.tokens, sizes.media_start, media_cost, options)
    arrays = [array for step in plan.steps for array in (step.samples, step.bin_of, step.delay)]
    batches = [batch for step in plan.steps for of_rank in step.encoder_batches for batch in of_rank]
    assert digest([*arrays, *batches, plan.left]) == expected
