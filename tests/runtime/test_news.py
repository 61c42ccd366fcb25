"""News of encoder ranks reach the first backbone rank, for as long as it is there."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from flowtrain_lightning.parallel.groups import CrossGroup, Groups
from flowtrain_lightning.pool import Key, Mesh
from flowtrain_lightning.runtime.news import News
from tests.pool.ranks import meshes, open_pools, wait_for

BACKBONE, ENCODER = 0, 1


def key_of(number: int, encoder_rank: int) -> Key:
    return Key(0, number, encoder_rank)


def news_of(mesh: Mesh) -> News:
    alone = CrossGroup(dist.HashStore(), BACKBONE, 1, timedelta(seconds=5))
    return News(Groups(alone, alone, alone, 0, 1, None, iter(())), mesh, [ENCODER], BACKBONE, key_of)


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_nothing_is_sent_to_a_rank_whose_run_is_over(transport: str):
    with meshes(2, transport) as (backbone, encoder):
        pools = open_pools([backbone, encoder], 1 << 16, 1 << 16, transport)
        news_of(encoder).send(0, 0, "in time", pools[ENCODER])
        wait_for(pools[BACKBONE], lambda: pools[BACKBONE].get(key_of(0, 0)))
        backbone.close()
        wait_for(pools[ENCODER], lambda: encoder.has_left(BACKBONE))
        news_of(encoder).send(1, 0, "too late", pools[ENCODER])
