"""What the ranks of a run load."""

from __future__ import annotations

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.placement.run_costs import rank_shard


def test_a_shard_tells_on_which_node_each_rank_is():
    allocation = default_allocation(8, "separate", encoder_ranks=2, devices_per_node=4)
    shard = rank_shard(allocation, 0, nodes=2)
    assert shard.encoder_nodes == (0, 1)
    assert shard.backbone_nodes == (0, 0, 0, 1, 1, 1)
    assert rank_shard(allocation, 0).encoder_nodes == rank_shard(allocation, 0).backbone_nodes == ()
