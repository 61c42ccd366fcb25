"""What an allocation promises, and what it refuses."""

from __future__ import annotations

import pickle

import pytest

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout


def allocate(encoder=(2,), backbone=(0, 1), placement="separate", layouts=None):
    layouts = layouts or {"encoder": Layout(data=len(encoder)), "backbone": Layout(data=len(backbone))}
    return Allocation(placement, layouts, {"encoder": encoder, "backbone": backbone})


def test_it_knows_the_place_of_each_rank_within_a_role():
    allocation = allocate(encoder=(1, 3), backbone=(0, 2, 4))
    assert [allocation.rank_within("encoder", rank) for rank in range(5)] == [None, 0, None, 1, None]
    assert [allocation.rank_within("backbone", rank) for rank in range(5)] == [0, None, 1, None, 2]


def test_it_describes_itself_in_one_line():
    assert allocate((3, 7), (0, 1, 2, 4, 5, 6)).describe() == (
        "separate: encoder on ranks 3, 7 (data 2, replicate); backbone on ranks 0-2, 4-6 (data 6, replicate)"
    )
    assert allocate((0,), (0,), "colocated").describe() == "colocated: encoder and backbone on rank 0"


def test_it_survives_a_trip_to_another_process():
    assert pickle.loads(pickle.dumps(allocate())) == allocate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placement": "apart"}, "no placement 'apart'; choose from 'separate', 'colocated', 'mixed'"),
        ({"encoder": (1, 2)}, "share no rank, but both roles have rank 1"),
        ({"placement": "colocated"}, r"same ranks, but the encoder has \[2\] and the backbone \[0, 1\]"),
        ({"encoder": (3,)}, r"from 0 without a gap, but the roles use \[0, 1, 3\]"),
        ({"encoder": (0,), "backbone": (1, 2)}, "Rank 0 must be a backbone rank"),
        ({"backbone": (1, 0)}, r"backbone ranks \[1, 0\] must be ascending"),
        ({"backbone": (0, 0)}, r"backbone ranks \[0, 0\] must be ascending, each named once"),
        (
            {"layouts": {"encoder": Layout(), "backbone": Layout(data=3)}},
            r"needs 3 ranks, but the role has 2: \[0, 1\]",
        ),
        ({"layouts": {"encoder": Layout()}}, "needs layouts for 'encoder', 'backbone', but has 'encoder'"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(arguments, words):
    with pytest.raises(AllocationError, match=words):
        allocate(**arguments)
