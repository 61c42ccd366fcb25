"""The part of a large allocation that is simulated in its place."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.allocator.rank_assignment import assign_ranks
from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.placement.cluster_part import part_of

MOST = 64


def separate(encoder, backbone):
    layouts = {"encoder": encoder, "backbone": backbone}
    return Allocation("separate", layouts, assign_ranks(layouts, "backbone", 8))


def colocated(encoder, backbone):
    ranks = tuple(range(backbone.ranks))
    return Allocation(
        "colocated", {"encoder": encoder, "backbone": backbone}, dict.fromkeys(("encoder", "backbone"), ranks)
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_part_has_few_ranks_each_with_as_much_to_do_whatever_the_degrees(seed):
    draw = np.random.default_rng(seed)
    nodes = int(draw.integers(64, 2048))
    taken = int(draw.integers(nodes // 5, nodes * 4 // 5))
    shard = str(draw.choice(["replicate", "fsdp"]))
    whole = separate(Layout(8 * taken), Layout(2 * (nodes - taken), tensor=4, shard=shard))
    part, share = part_of(whole, MOST)
    assert 16 <= part.size <= MOST
    for role, layout in part.layouts.items():
        before = whole.layouts[role]
        assert (layout.tensor, layout.shard) == (before.tensor, before.shard)
        work = before.data / share / layout.data  # of a rank of the part, over that of a rank of the whole
        assert work == pytest.approx(1, abs=0.1 if layout.data < 8 else 0.05)


def test_a_share_that_divides_all_degrees_is_taken_before_one_that_rounds():
    whole = colocated(Layout(2048), Layout(512, tensor=4, shard="fsdp", replicas=64))
    part, share = part_of(whole, MOST)
    assert part.size == 2048 / share == MOST
    assert part.layouts["backbone"].replicas == 64 / share


def test_several_separate_roles_have_ranks_of_their_own():
    layouts = {"encoder": Layout(1088), "backbone": Layout(3072, tensor=4), "generator": Layout(3008)}
    part, share = part_of(Allocation("separate", layouts, assign_ranks(layouts, "backbone", 8)), MOST)
    assert part.size == sum(map(len, part.ranks.values())) <= MOST
    assert part.layouts["backbone"].data * share == pytest.approx(3072, rel=0.1)


def test_roles_may_have_any_names():
    layouts = {"c": Layout(512), "a": Layout(256), "b": Layout(256)}
    edges = (Edge("a", "c", "image"), Edge("b", "c", "audio"))
    ranks = {"c": tuple(range(512)), "a": tuple(range(512, 768)), "b": tuple(range(768, 1024))}
    part, share = part_of(Allocation("separate", layouts, ranks, edges=edges), MOST)
    assert {role: len(own) for role, own in part.ranks.items()} == {"c": 32, "a": 16, "b": 16}
    assert share == 16


def test_colocated_roles_keep_the_same_ranks():
    part, share = part_of(colocated(Layout(8 * 509), Layout(4 * 509, tensor=2)), MOST)
    assert part.ranks["encoder"] == part.ranks["backbone"]
    assert part.size == 8 * 509 / share


def test_a_small_allocation_is_simulated_whole():
    whole = separate(Layout(3), Layout(5))
    assert part_of(whole, MOST) == (whole, 1.0)


def test_groups_too_large_for_a_part_of_few_ranks_leave_one_of_a_few_times_as_many():
    layouts = {
        "encoder": Layout(4096, 4, shard="fsdp", replicas=256),
        "backbone": Layout(1760, 8, shard="fsdp", replicas=110),
    }
    ranks = {"encoder": tuple(range(16384)), "backbone": tuple(range(14080))}
    part, share = part_of(Allocation("mixed", layouts, ranks), MOST)
    assert part.size <= 8 * MOST
    for role, layout in part.layouts.items():
        assert layouts[role].data / share / layout.data == pytest.approx(1, abs=0.1)
