"""What the ranks of a run load."""

from __future__ import annotations

from flowtrain_lightning.allocator import Allocation, Layout, default_allocation
from flowtrain_lightning.packing.step_graph import Meeting
from flowtrain_lightning.placement.run_costs import rank_shard


def test_a_shard_tells_on_which_node_each_rank_is():
    allocation = default_allocation(8, "separate", encoder_ranks=2, devices_per_node=4)
    shard = rank_shard(allocation, 0, nodes=2)
    assert shard.members.nodes == {"encoder": (0, 1), "backbone": (0, 0, 0, 1, 1, 1)}
    assert rank_shard(allocation, 0).members.nodes == {}


def test_of_several_encoders_a_shard_knows_what_each_needs():
    layouts = {"encoder_image": Layout(1, tensor=2), "encoder_audio": Layout(2, shard="fsdp"), "backbone": Layout(1)}
    ranks = {"encoder_image": (1, 2), "encoder_audio": (3, 4), "backbone": (0,)}
    members = rank_shard(Allocation("separate", layouts, ranks), 0).members
    assert members.meeting("encoder_image") == Meeting(2)
    assert members.meeting("encoder_audio") == Meeting(1, 2, ("forward", "backward"))
    assert members.meeting("backbone") == Meeting()
    assert members.in_fixed_order
