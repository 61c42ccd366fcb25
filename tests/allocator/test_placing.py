"""Which rank does what."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowtrain_lightning.allocator import AllocationError, Layout
from flowtrain_lightning.allocator.placing import place

DEGREES = st.sampled_from([1, 2, 4, 8])


def test_encoders_are_the_last_ranks_of_each_node():
    ranks = place({"encoder": Layout(data=4), "backbone": Layout(data=6, tensor=2)}, 8)
    assert ranks["encoder"] == (6, 7, 14, 15)


def test_tensor_ranks_of_the_backbone_stay_together():
    ranks = place({"encoder": Layout(data=4), "backbone": Layout(data=3, tensor=4)}, 8)
    assert ranks == {"encoder": (12, 13, 14, 15), "backbone": tuple(range(12))}


def test_a_backbone_that_leaves_no_room_for_rank_0_is_refused():
    with pytest.raises(AllocationError, match=r"The backbone has 1 device, .* groups of 4; give it at least 4"):
        place({"encoder": Layout(data=2, tensor=4), "backbone": Layout()}, 8)


@given(
    st.lists(st.tuples(st.integers(1, 12), DEGREES, st.sampled_from([1, 2, 3])), min_size=2, max_size=3),
    st.sampled_from([8, 16]),
)
def test_every_group_of_tensor_ranks_is_on_one_node_and_every_rank_has_one_role(shapes, per_node):
    names = ["backbone", "encoder_image", "encoder_audio"]
    layouts = {
        name: Layout(data, tensor, pipeline) for name, (data, tensor, pipeline) in zip(names, shapes, strict=False)
    }
    assume(layouts["backbone"].ranks >= max(layout.tensor for layout in layouts.values()))
    ranks = place(layouts, per_node)
    used = sorted(rank for found in ranks.values() for rank in found)
    assert used == list(range(sum(layout.ranks for layout in layouts.values())))
    assert 0 in ranks["backbone"]
    for role, layout in layouts.items():
        assert list(ranks[role]) == sorted(ranks[role])
        for start in range(0, layout.ranks, layout.tensor):
            group = ranks[role][start : start + layout.tensor]
            assert len({rank // per_node for rank in group}) == 1
