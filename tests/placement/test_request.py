"""What a user says about the allocation: read, or refused with both sides of what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.allocator import Allocation, AllocationError, Layout, RoleLayout, default_allocation, graph_of
from flowtrain_lightning.allocator.plan_file import write_plan
from flowtrain_lightning.placement.profile import ProfileError, write_profile
from flowtrain_lightning.placement.request import (
    batches_kept,
    make_request,
    refuse_what_cannot_run,
    why_it_cannot_run,
)
from tests.placement.profiles import make_profile

PLAN = default_allocation(3, encoder_ranks=1)


DRAWING = ("encoder", "backbone", "generator")


def planned(placement, backbone, **encoders):
    """Roles with so many copies or of these layouts, on ranks one after another."""
    given = {"backbone": backbone, **encoders}
    layouts = {role: each if isinstance(each, Layout) else Layout(each) for role, each in given.items()}
    ranks, first = {}, 0
    for role, layout in layouts.items():
        ranks[role] = tuple(range(first, first + layout.ranks))
        first += layout.ranks
    return Allocation(placement, layouts, ranks)


def mixed(encoder, backbone):
    """Mixed roles of so many copies or of these layouts, the backbone on the first ranks."""
    layouts = {"encoder": encoder, "backbone": backbone}
    layouts = {role: each if isinstance(each, Layout) else Layout(each) for role, each in layouts.items()}
    return Allocation("mixed", layouts, {role: tuple(range(layout.ranks)) for role, layout in layouts.items()})


def test_what_is_left_open_is_not_answered():
    assert make_request(None, None, None, "auto").answer(4) is None
    assert make_request(None, None, None, "off").answer(4) is None


def test_one_rank_leaves_nothing_open():
    assert make_request(None, None, None, "auto").answer(1) == default_allocation(1)


def test_placement_or_encoder_ranks_answer_by_the_rule():
    assert make_request(None, "colocated", None, "auto").answer(4) == default_allocation(4, "colocated")
    assert make_request(None, None, 2, "auto").answer(4) == default_allocation(4, encoder_ranks=2)


def test_on_several_nodes_each_has_encoder_ranks():
    assert make_request(None, None, 2, "auto").answer(4, nodes=2).ranks == {"encoder": (1, 3), "backbone": (0, 2)}


def test_a_roles_layout_is_taken_as_a_plain_dictionary():
    roles = {"backbone": {"shard": "fsdp", "tensor": 2}, "encoder": RoleLayout(recompute="full")}
    request = make_request(None, None, 2, "auto", roles)
    assert request.roles == {"backbone": RoleLayout("fsdp", tensor=2), "encoder": RoleLayout(recompute="full")}
    assert request.answer(6) == make_request(None, None, 2, "auto", request.roles).answer(6)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ({"backbone": {"sharding": "fsdp"}}, "gives the backbone 'sharding', but a layout has context, .*, shard, ten"),
        ({"backbone": {"shard": "FSDP"}}, "roles for the backbone: RoleLayout got shard='FSDP'; give 'replicate', "),
        ({"backbone": {"shard": "zero3"}}, "shard 'zero3', which can be planned but not trained"),
        (
            {"backbone": {"recompute": True}},
            "roles for the backbone: RoleLayout got recompute=True; give 'none', 'selective' or 'full'",
        ),
        ({"encoder": {"offload": "cpu"}}, "roles for the encoder: RoleLayout got offload='cpu'; give 'none', "),
        ({"backbone": {"tensor": "2"}}, "RoleLayout got tensor='2'; give a whole number of at least 1"),
        ({"backbone": {"context": 0}}, "RoleLayout got context=0; give a whole number of at least 1"),
        ({"backbone": "fsdp"}, r"the backbone 'fsdp'; give a RoleLayout or a dictionary such as \{'shard': 'fsdp'\}"),
        ("fsdp", "roles is 'fsdp'; it says what layout each role has"),
    ],
)
def test_a_roles_layout_that_does_not_exist_is_refused_by_the_constructor(roles, words):
    with pytest.raises(AllocationError, match=words):
        FlowTrainStrategy(encoder_ranks=1, roles=roles)


def test_an_allocation_is_taken_as_an_object_or_from_a_file(tmp_path):
    write_plan(PLAN, tmp_path / "plan.yaml", "by hand")
    for given in (PLAN, tmp_path / "plan.yaml", str(tmp_path / "plan.yaml")):
        assert make_request(given, None, None, "auto").answer(3) == PLAN


def test_the_command_line_takes_an_allocation_and_a_profile_by_path(tmp_path):
    write_plan(PLAN, tmp_path / "plan.yaml", "by hand")
    write_profile(make_profile(1, 1), tmp_path / "profile.json")
    parser = ArgumentParser()
    parser.add_class_arguments(FlowTrainStrategy, "strategy")
    for option in (f"allocation={tmp_path / 'plan.yaml'}", f"profile={tmp_path / 'profile.json'}", "profile=off"):
        given = parser.instantiate_classes(parser.parse_args([f"--strategy.{option}"])).strategy
        assert isinstance(given, FlowTrainStrategy)
    parsed = parser.parse_args([f"--strategy.allocation={tmp_path / 'plan.yaml'}"]).strategy.allocation
    assert make_request(parsed, None, None, "auto").answer(3) == PLAN


def test_a_profile_is_read_at_once(tmp_path):
    write_profile(make_profile(1, 1), tmp_path / "profile.json")
    assert make_request(None, None, None, tmp_path / "profile.json").profile == make_profile(1, 1)
    with pytest.raises(ProfileError, match=r"missing.json"):
        make_request(None, None, None, tmp_path / "missing.json")


def test_a_plan_for_other_ranks_is_refused_with_both_numbers(tmp_path):
    write_plan(PLAN, tmp_path / "plan.yaml", "by hand")
    request = make_request(tmp_path / "plan.yaml", None, None, "auto")
    with pytest.raises(AllocationError, match=r"plan.yaml is for 3 ranks, .* starts 2 ranks. .*devices=3"):
        request.answer(2)


@pytest.mark.parametrize(
    ("allocation", "words"),
    [
        (
            planned("separate", encoder=Layout(1, pipeline=2, virtual=2), backbone=1),
            "virtual 2, replicate, but the stages of a role that encodes have one run of its layers each",
        ),
        (
            planned("separate", encoder=Layout(1, pipeline=2, schedule="zb-h1"), backbone=1),
            "zb-h1, replicate, but the stages of a role that encodes have one run of its layers each, and work in the",
        ),
        (
            planned("separate", encoder=Layout(1, pipeline=2, context=2), backbone=1),
            "the encoder context 2, but only the backbone has sequences to share",
        ),
        (
            planned("separate", encoder=Layout(2, pipeline=2, expert=2), backbone=1),
            "expert 2, replicate, but in a pipeline the ranks of a stage hold whole copies",
        ),
        (mixed(Layout(2, pipeline=2), 2), "but in the placement mixed each rank encodes by itself"),
        (
            replace(mixed(Layout(2, shard="fsdp"), Layout(1, pipeline=2, schedule="zb-h1")), placement="colocated"),
            "the encoder on the same ranks has data 2, fsdp, whose ranks wait for each other in the placement",
        ),
        (
            replace(mixed(Layout(1, pipeline=2), Layout(2, expert=2)), placement="colocated"),
            "pipeline 2, replicate, but the backbone on the same ranks has data 2, expert 2, replicate, whose ranks",
        ),
        (
            planned("separate", encoder=1, backbone=Layout(2, pipeline=2, expert=2)),
            "data 2, pipeline 2, expert 2, replicate, but in a pipeline the ranks of a stage hold whole copies",
        ),
        (
            mixed(Layout(1, tensor=2), Layout(1, pipeline=2)),
            "the encoder on the same ranks has data 1, tensor 2, replicate, whose ranks wait for each other",
        ),
        (planned("separate", encoder=Layout(1, context=2), backbone=1), "the encoder context 2, but only the backbone"),
        (planned("separate", encoder=1, backbone=Layout(2, shard="zero2")), "the backbone the layout data 2, zero2"),
        (
            replace(
                planned("separate", encoder=1, backbone=Layout(2, shard="deepspeed-3")), recompute={"backbone": "full"}
            ),
            r"has the backbone in shard 'deepspeed-3' recompute its blocks, .* Leave recompute out, or",
        ),
        (
            planned("separate", encoder=1, backbone=Layout(2, tensor=2, shard="deepspeed-1")),
            "data 2, tensor 2, deepspeed-1 in the placement separate, but DeepSpeed .* without tensor and context",
        ),
        (mixed(Layout(4, shard="deepspeed-1"), 2), "deepspeed-1 in the placement mixed, but DeepSpeed runs here in"),
        (
            mixed(Layout(4, shard="fsdp"), 2),
            r"is mixed .* data 4, fsdp, in which ranks 0-3 need each other .* only some of them are backbone ranks",
        ),
        (
            planned("separate", image=1, audio=1, backbone=1),
            "the roles backbone, image, audio, but the module has the halves encoder, backbone",
        ),
    ],
    ids=[
        "stages of an encoder in several runs",
        "stages of an encoder that split backwards",
        "stages of an encoder that share sequences",
        "stages of an encoder that divide experts",
        "stages of an encoder on ranks of two kinds",
        "stages that split backwards beside an encoder in shards",
        "stages of an encoder beside experts",
        "stages that divide experts",
        "stages beside an encoder whose tensor ranks are of two kinds",
        "context of the encoder",
        "ZeRO of any system",
        "blocks computed again by ZeRO-3",
        "tensor ranks under DeepSpeed",
        "DeepSpeed on ranks of both kinds",
        "a shard group of both kinds",
        "two encoders",
    ],
)
def test_a_plan_that_cannot_run_yet_is_refused(allocation, words):
    with pytest.raises(AllocationError, match=words):
        make_request(allocation, None, None, "auto").answer(len(set().union(*allocation.ranks.values())))


@pytest.mark.parametrize(
    ("allocation", "words"),
    [
        (
            Allocation("mixed", dict.fromkeys(DRAWING, Layout()), dict.fromkeys(DRAWING, (0,))),
            "is mixed, but a generator behind the backbone runs in separate and colocated placements",
        ),
        (planned("separate", 1, encoder=Layout(2, shard="deepspeed-1"), generator=1), "DeepSpeed has not been tried"),
        (planned("separate", Layout(1, context=2), encoder=1, generator=1), "gives the backbone .* not divided among"),
        (planned("separate", 1, encoder=1, generator=Layout(1, tensor=2)), "gives the generator .* own layers among"),
    ],
    ids=["mixed", "DeepSpeed", "context", "tensor"],
)
def test_a_plan_that_cannot_run_with_a_generator_is_refused(allocation, words):
    with pytest.raises(AllocationError, match=words):
        make_request(allocation, None, None, "auto").answer(allocation.size, graph=graph_of(DRAWING))


def test_a_plan_that_runs_has_no_reason_against_it():
    assert why_it_cannot_run(PLAN) is None
    assert why_it_cannot_run(default_allocation(2, "colocated")) is None
    assert why_it_cannot_run(planned("separate", encoder=1, backbone=Layout(4, shard="fsdp", replicas=2))) is None
    assert why_it_cannot_run(mixed(4, 2)) is None
    assert why_it_cannot_run(mixed(Layout(4), Layout(1, pipeline=2, context=2))) is None
    in_shards = Layout(4, 2, pipeline=2, shard="fsdp", replicas=2)
    assert why_it_cannot_run(planned("separate", encoder=1, backbone=in_shards)) is None
    assert why_it_cannot_run(mixed(Layout(4, shard="fsdp", replicas=2), 2)) is None
    assert why_it_cannot_run(mixed(Layout(2, tensor=2), Layout(1, tensor=2))) is None
    shared = Layout(2, tensor=2, context=2, shard="fsdp")
    assert why_it_cannot_run(planned("separate", encoder=Layout(1, tensor=2), backbone=shared)) is None


def test_a_role_gets_the_layout_that_was_asked_for_beside_the_rule():
    roles = {"backbone": RoleLayout("fsdp", replicas=2, recompute="full")}
    found = make_request(None, None, 1, "auto", roles).answer(5)
    assert found.layouts == {"encoder": Layout(1), "backbone": Layout(4, shard="fsdp", replicas=2)}
    assert found.recompute == {"backbone": "full"}


def test_ranks_that_share_layers_and_sequences_leave_fewer_data_ranks():
    roles = {"backbone": RoleLayout(tensor=2, context=2)}
    found = make_request(None, None, 1, "auto", roles).answer(9)
    assert found.layouts["backbone"] == Layout(2, tensor=2, context=2)
    assert found.members("backbone") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [found.member_of("backbone", rank) for rank in (0, 3, 4, 8)] == [0, 0, 1, None]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ({"backbone": RoleLayout("fsdp", replicas=3)}, "4 data ranks in 3 replicas"),
        ({"backbone": RoleLayout(tensor=3)}, "4 ranks cannot be divided into groups of tensor 3 x context 1"),
        ({"backbone": RoleLayout(replicas=2)}, "replicas 2, but shard 'replicate'"),
        ({"decoder": RoleLayout("fsdp")}, "There is no role 'decoder'; the roles are 'encoder', 'backbone'"),
        ({"backbone": RoleLayout("zero3")}, "the backbone shard 'zero3', which can be planned but not trained"),
    ],
)
def test_a_layout_that_the_ranks_of_a_role_cannot_have_is_refused(roles, words):
    with pytest.raises(AllocationError, match=words):
        make_request(None, None, 1, "auto", roles).answer(5)


def test_a_layout_without_a_word_on_who_encodes_is_refused():
    with pytest.raises(AllocationError, match="Give encoder_ranks or placement too"):
        make_request(None, None, None, "auto", {"backbone": RoleLayout("fsdp")})


@pytest.mark.parametrize(
    ("placement", "encoder_ranks", "words"),
    [("colocated", None, "placement='colocated'"), (None, 1, "encoder_ranks='1'")],
)
def test_an_allocation_beside_a_part_of_one_is_refused(placement, encoder_ranks, words):
    with pytest.raises(AllocationError, match=f"Both allocation and {words}"):
        make_request(PLAN, placement, encoder_ranks, "auto")


def test_a_profile_beside_what_leaves_nothing_to_plan_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(AllocationError, match="Both allocation and profile="):
        make_request(PLAN, None, None, path)
    with pytest.raises(AllocationError, match="leave nothing to plan"):
        make_request(None, None, 1, path)


@pytest.mark.parametrize("text", ["placement: separate", "[1, 2", ""])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(AllocationError, match=r"plan.yaml"):
        make_request(tmp_path / "plan.yaml", None, None, "auto")


TWO = {"encoder_image": 1, "encoder_audio": 2}


def sharing(placement: Any, backbone: int) -> Allocation:
    """Two ranks with both encoders, of which some have the backbone too."""
    layouts = {"encoder_image": Layout(2), "encoder_audio": Layout(2), "backbone": Layout(backbone)}
    ranks = {role: tuple(range(layout.data)) for role, layout in layouts.items()}
    return Allocation(placement, layouts, ranks)


@pytest.mark.parametrize(
    "allocation",
    [
        planned("separate", backbone=2, **TWO),
        planned("separate", backbone=Layout(2, shard="deepspeed-2"), **TWO),
        sharing("colocated", 2),
        sharing("mixed", 1),
    ],
    ids=Allocation.describe,
)
def test_encoders_of_two_modalities_run_in_every_placement(allocation):
    assert why_it_cannot_run(allocation) is None
    graph = graph_of(("encoder_audio", "encoder_image", "backbone"))
    assert make_request(allocation, None, None, "auto").answer(allocation.size, graph=graph) == allocation.bound(graph)


def test_roles_whose_names_say_nothing_are_refused():
    with pytest.raises(AllocationError, match="ear, whose names do not say what flows"):
        refuse_what_cannot_run(planned("separate", backbone=1, encoder_image=1, ear=1), "It")


@pytest.mark.parametrize(
    ("settings", "allocation"),
    [
        (("separate", None), "separate: encoder_image on rank 2 (data 1, replicate); encoder_audio on rank 3"),
        (("colocated", None), "colocated: encoder_image and encoder_audio and backbone on ranks 0-3"),
        (("mixed", 1), "mixed: encoder_image on ranks 0-3 (data 4, replicate); encoder_audio on ranks 0-3"),
        ((None, {"encoder_image": 1, "encoder_audio": 2}), "separate: encoder_image on rank 1 (data 1, replicate); en"),
    ],
)
def test_ranks_of_several_encoders_follow_from_a_rule(settings, allocation):
    graph = graph_of(("encoder_image", "encoder_audio", "backbone"))
    assert make_request(None, *settings, "auto").answer(4, graph=graph).describe().startswith(allocation)
    assert make_request(None, None, None, "auto").answer(4, graph=graph) is None  # found out by measuring


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((None, 1), "With encoder_ranks=1 the encoder_audio has no rank of its own; give each of encoder_image, enc"),
        ((None, {"encoder_image": 2}), "encoder_ranks is .*; give each role that encodes .encoder_image, encoder_aud"),
        (("mixed", {"encoder_image": 1, "encoder_audio": 1}), "ranks that only encode do so for all roles; give th"),
        (("colocated", {"encoder_image": 1, "encoder_audio": 1}), "no rank only encodes; leave encoder_ranks out"),
        ((None, {"encoder_image": 3, "encoder_audio": 1}), "4 encoder ranks leave no backbone rank on 4 devices"),
    ],
)
def test_numbers_of_encoder_ranks_that_do_not_go_are_refused(settings, words):
    graph = graph_of(("encoder_image", "encoder_audio", "backbone"))
    with pytest.raises(AllocationError, match=words):
        make_request(None, *settings, "auto").answer(4, graph=graph)


@pytest.mark.parametrize(
    ("allocation", "halves"),
    [
        (PLAN, ("encoder_image", "encoder_audio", "backbone")),
        (planned("separate", backbone=1, **TWO), ("encoder", "backbone")),
        (planned("separate", backbone=1, **TWO), ("encoder_image", "encoder_video", "backbone")),
    ],
    ids=["too few", "too many", "others"],
)
def test_roles_that_are_not_the_halves_of_the_module_are_refused(allocation, halves):
    with pytest.raises(AllocationError, match=f"but the module has the halves {', '.join(halves)}"):
        make_request(allocation, None, None, "auto").answer(allocation.size, graph=graph_of(halves))


@pytest.mark.parametrize(
    "allocation",
    [
        planned("separate", encoder=1, backbone=Layout(1, pipeline=3)),
        planned("separate", encoder=Layout(2, shard="fsdp"), backbone=Layout(2, pipeline=2, shard="fsdp")),
        replace(mixed(4, Layout(2, pipeline=2)), placement="colocated"),
        replace(mixed(Layout(2, pipeline=2), Layout(1, pipeline=4)), placement="colocated"),
        planned("separate", encoder=Layout(1, pipeline=2), backbone=Layout(2, pipeline=2, shard="fsdp")),
        planned("separate", encoder=Layout(2, 2, pipeline=2, shard="fsdp"), backbone=1),
        replace(mixed(Layout(2, pipeline=2, shard="fsdp"), Layout(1, pipeline=4)), placement="colocated"),
        replace(mixed(Layout(1, pipeline=2), Layout(2, shard="fsdp")), placement="colocated"),
        replace(mixed(Layout(2, shard="fsdp"), Layout(1, pipeline=2)), placement="colocated"),
    ],
    ids=[
        "whole copies",
        "shards",
        "colocated",
        "both",
        "both, apart",
        "an encoder in shards",
        "both, in shards",
        "an encoder's beside shards",
        "beside an encoder in shards",
    ],
)
def test_roles_in_stages_run(allocation):
    assert why_it_cannot_run(allocation) is None


@pytest.mark.parametrize(
    ("allocation", "told"),
    [
        (
            planned("separate", encoder=1, backbone=Layout(2, pipeline=2, schedule="zb-h1", shard="fsdp")),
            "the schedule zb-h1 makes gradients of weights later",
        ),
        (
            planned("separate", encoder=1, backbone=Layout(1, tensor=2, pipeline=2, schedule="zb-v")),
            "the schedule zb-v makes gradients of weights later",
        ),
        (
            replace(mixed(4, Layout(2, pipeline=2, schedule="zb-v")), placement="colocated"),
            "several runs of layers in a stage",
        ),
    ],
    ids=["shards", "tensor", "colocated"],
)
def test_stages_that_split_backwards_take_whole_copies_and_a_v_ranks_of_its_own(allocation, told):
    assert told in (why_it_cannot_run(allocation) or "")


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"schedule": "zb-h1"}, "but pipeline 1: it is an order of stages"),
        ({"pipeline": 2, "virtual": 2, "schedule": "zb-v"}, "are interleaved in 1F1B only"),
        ({"pipeline": 2, "schedule": "gpipe"}, "cannot have the schedule 'gpipe'"),
        ({"pipeline": 2, "cut": "layers"}, "has the cut 'layers' and pipeline 2"),
        ({"cut": "number"}, "has the cut 'number' and pipeline 1"),
    ],
)
def test_schedules_that_are_no_order_of_such_stages_are_refused(layout, told):
    with pytest.raises(AllocationError, match=told):
        Layout(1, **layout)


def test_encoder_batches_are_kept_as_asked_or_as_planned_or_as_usual():
    plain = default_allocation(2)
    planned = replace(plain, encoder_activations=1)
    assert [batches_kept(2, planned), batches_kept(0, planned)] == [2, 0]
    assert [batches_kept(None, planned), batches_kept(None, plain), batches_kept(None, None)] == [1, 4, 4]
