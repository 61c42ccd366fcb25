"""Costs decide how a step is packed, and a checkpoint gives back those that were left open."""

import json

import numpy as np
import pytest

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.data.planning import PackingConfig
from flowtrain_lightning.packing import CostModel, SampleSizes

COST, ENCODER_COST = CostModel(1.0, 0.5, 0.25), CostModel(0.1, 0.0, 0.0)
OPEN = frozenset({"cost", "encoder_cost"})


def sizes(*tokens):
    count = len(tokens)
    ones = np.ones(count, dtype=np.int64)
    return SampleSizes(np.array(tokens), ones, np.arange(count + 1), ones, ones)


def test_the_cost_model_decides_who_computes_what():
    part, lengths = RankShard(0, 2, 0, 1), [8, 4, 4, 4, 4]

    def totals(cost):
        plan = PackingConfig(16, cost).plan(sizes(*lengths), np.arange(5), part)
        return sorted(sum(lengths[i] for members in of_rank for i in members) for of_rank in plan.microbatches)

    assert totals(CostModel(1.0, 0.0, 0.0)) == [12, 12]
    assert totals(CostModel(0.0, 1.0, 0.0)) == [8, 16]


def test_a_rank_with_both_lanes_encodes_what_it_reads():
    part = RankShard(0, 2, 0, 2, colocated_encoder_ranks=(1, 0))
    plan = PackingConfig(16).plan(sizes(8, 8, 8, 8), np.arange(4), part)
    assert {(entry.backbone_rank, entry.encoder_rank) for entry in plan.entries} == {(0, 1), (1, 0)}


@pytest.mark.parametrize("planning", [PackingConfig(16), PackingConfig(16, COST, ENCODER_COST, "microbatch")])
def test_a_checkpoint_gives_back_what_was_left_open(planning):
    state = json.loads(json.dumps(planning.state_dict()))
    assert PackingConfig(16, sync_every=planning.sync_every).resumed_from(state, OPEN) == planning


def test_what_was_given_stays():
    given = PackingConfig(32, COST, ENCODER_COST)
    assert given.resumed_from(PackingConfig(16).state_dict(), frozenset()) == given
