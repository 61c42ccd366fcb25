"""Layouts and allocations: what they promise, and what they refuse."""

from __future__ import annotations

import json
import pickle

import pytest

from flowtrain_lightning.allocator import Allocation, AllocationError, Edge, Layout, RoleGraph, default_allocation


def test_a_layout_needs_the_product_of_its_degrees():
    assert Layout(data=2, tensor=3, pipeline=4, context=5).ranks == 120


def test_a_layout_says_what_is_special_about_it():
    assert Layout().describe() == "data 1, replicate"
    assert Layout(data=2, tensor=4).describe() == "data 2, tensor 4, replicate"


def test_whole_copies_differ_in_their_data_degree_only():
    assert Layout(data=3).is_whole_copies
    assert not Layout(data=3, shard="zero1").is_whole_copies
    assert not Layout(data=3, context=2).is_whole_copies


@pytest.mark.parametrize("name", ["data", "tensor", "pipeline", "context"])
def test_a_degree_below_one_is_refused_by_name(name):
    with pytest.raises(AllocationError, match=f"The {name} degree of a layout is 0; it must be at least 1"):
        Layout(**{name: 0})


def test_an_unknown_sharding_is_refused_with_what_is_known():
    known = "'replicate', 'zero1', 'zero2', 'zero3', 'fsdp', 'deepspeed-1', 'deepspeed-2', 'deepspeed-3'"
    with pytest.raises(AllocationError, match=f"A layout cannot shard by 'halves'; known are {known}"):
        Layout(shard="halves")


def allocate(encoder=(2,), backbone=(0, 1), placement="separate", layouts=None, recompute=None, offload=None, **more):
    layouts = layouts or {"encoder": Layout(data=len(encoder)), "backbone": Layout(data=len(backbone))}
    ranks = {"encoder": encoder, "backbone": backbone}
    return Allocation(placement, layouts, ranks, recompute or {}, offload or {}, **more)


def test_it_knows_the_index_of_each_rank_within_a_role():
    allocation = allocate(encoder=(1, 3), backbone=(0, 2, 4))
    assert [allocation.rank_within("encoder", rank) for rank in range(5)] == [None, 0, None, 1, None]
    assert [allocation.rank_within("backbone", rank) for rank in range(5)] == [0, None, 1, None, 2]


def test_it_describes_itself_in_one_line():
    assert allocate((3, 7), (0, 1, 2, 4, 5, 6)).describe() == (
        "separate: encoder on ranks 3, 7 (data 2, replicate); backbone on ranks 0-2, 4-6 (data 6, replicate)"
    )
    assert allocate((0,), (0,), "colocated").describe() == "colocated: encoder and backbone on rank 0"


def test_it_knows_which_ranks_have_both_lanes():
    assert default_allocation(3, "colocated").step_members().colocated == {"encoder": ((0, 0), (1, 1), (2, 2))}
    assert default_allocation(3, "separate").step_members().colocated == {}
    layouts = {"encoder": Layout(3), "backbone": Layout(2)}
    mixed = Allocation("mixed", layouts, {"encoder": (0, 1, 2), "backbone": (0, 2)})
    assert mixed.step_members().colocated == {"encoder": ((0, 0), (2, 1))}
    assert mixed.size == 3


@pytest.mark.parametrize(
    "allocation",
    [
        allocate(),
        allocate(recompute={"backbone": "full"}),
        allocate(offload={"encoder": "activations"}),
        allocate(order="searched"),
        allocate(order="searched", activation_bytes=3e10, offload={"encoder": "activations"}),
        allocate(encoder_activations=1),
    ],
)
def test_it_survives_a_trip_to_another_process_and_to_json(allocation):
    assert pickle.loads(pickle.dumps(allocation)) == allocation
    assert Allocation.from_state(json.loads(json.dumps(allocation.state_dict()))) == allocation


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
        ({"layouts": {"encoder": Layout()}}, "needs ranks for 'encoder', but has them for 'encoder', 'backbone'"),
        ({"recompute": {"audio": "full"}}, "no role 'audio' to recompute; the roles are 'encoder', 'backbone'"),
        (
            {"recompute": {"encoder": "some"}},
            "encoder cannot recompute 'some'; choose from 'none', 'selective', 'full'",
        ),
        ({"offload": {"audio": "all"}}, "no role 'audio' to offload; the roles are 'encoder', 'backbone'"),
        (
            {"offload": {"encoder": "disk"}},
            "encoder cannot offload 'disk'; choose from 'none', 'weights', 'optimizer', 'activations', 'all'",
        ),
        ({"offload": {"encoder": "weights"}}, "encoder offloads 'weights', but only weights in shards of FSDP2"),
        (
            {"offload": {"encoder": "optimizer"}},
            "encoder offloads 'optimizer', but only where DeepSpeed runs a role .*Give it shard 'deepspeed-1'",
        ),
        (
            {"offload": {"encoder": "activations"}, "recompute": {"encoder": "full"}},
            "encoder offloads 'activations' and recomputes 'full'.*Leave one of them out",
        ),
        ({"order": "best"}, "no order 'best'; choose from 'rules', 'searched'"),
        (
            {"order": "searched", "layouts": {"encoder": Layout(), "backbone": Layout(data=2, shard="fsdp")}},
            "order is 'searched', but the backbone has .*fsdp.*Give every role whole copies",
        ),
        ({"activation_bytes": 1e9}, "activation_bytes is for one order of all works; give order: searched"),
        ({"order": "searched", "activation_bytes": 0.0}, "activation_bytes is 0.0; give the bytes"),
        ({"encoder_activations": 0}, "encoder_activations is 0; it must be at least 1"),
        (
            {"order": "searched", "activation_bytes": 1e9, "recompute": {"encoder": "full"}},
            "encoder recomputes in every batch, but with activation_bytes only those that find no room",
        ),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(arguments, words):
    with pytest.raises(AllocationError, match=words):
        allocate(**arguments)


def test_a_rank_knows_its_member_of_each_of_its_roles():
    layouts = {"backbone": Layout(2), "encoder_image": Layout(2), "encoder_audio": Layout(1)}
    ranks = {"backbone": (0, 3), "encoder_image": (1, 4), "encoder_audio": (2,)}
    allocation = Allocation("separate", layouts, ranks)
    assert allocation.roles == ("encoder_image", "encoder_audio", "backbone")
    own = [{"backbone": 0}, {"encoder_image": 0}, {"encoder_audio": 0}, {"backbone": 1}, {"encoder_image": 1}]
    assert [allocation.own_members(rank) for rank in range(5)] == own
    assert allocation.step_members().counts == {"encoder_image": 2, "encoder_audio": 1, "backbone": 2}


def free(placement="separate", ranks=((0,), (1,), (2,)), edges=None):
    """Roles a, b and c, whose names say nothing."""
    of_role = dict(zip("abc", ranks, strict=True))
    return Allocation(placement, {role: Layout(len(each)) for role, each in of_role.items()}, of_role, edges=edges)


GRAPH = RoleGraph((Edge("b", "a", "image"), Edge("c", "a", "audio")))


def test_roles_of_any_name_are_bound_to_what_flows_between_the_halves_of_a_module():
    allocation = free()
    assert not allocation.is_bound
    bound = allocation.bound(GRAPH)
    assert (bound.trunk, bound.producers, bound.roles) == ("a", ("b", "c"), ("b", "c", "a"))
    assert bound.bound(GRAPH) is bound
    assert Allocation.from_state(json.loads(json.dumps(bound.state_dict()))) == bound
    assert free(edges=GRAPH.edges) == bound


def test_the_usual_names_say_themselves_what_flows():
    allocation = allocate()
    assert allocation.bound(RoleGraph((Edge("encoder", "backbone"),))) is allocation
    assert "edges" not in allocation.state_dict()


@pytest.mark.parametrize(
    ("allocation", "graph", "words"),
    [
        (free(), RoleGraph((Edge("a", "c", "image"), Edge("b", "c", "audio"))), "Rank 0 must be a c rank"),
        (free("mixed", ((0,), (0, 1), (0,))), GRAPH, "every rank encodes, but the c has rank 0"),
        (free(edges=GRAPH.edges), RoleGraph((Edge("c", "a", "image"), Edge("b", "a", "audio"))), "those of the module"),
    ],
    ids=["rank 0", "mixed", "other edges"],
)
def test_what_contradicts_the_flow_is_refused_when_it_is_known(allocation, graph, words):
    with pytest.raises(AllocationError, match=words):
        allocation.bound(graph)
