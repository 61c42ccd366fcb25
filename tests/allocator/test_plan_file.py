"""Plans as YAML."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout
from flowtrain_lightning.allocator.plan_file import read_plan, write_plan

LAYOUTS = {"encoder": Layout(data=3), "backbone": Layout(data=2, tensor=2, pipeline=2, shard="zero1")}
RANKS = {"encoder": (5, 9, 10), "backbone": (0, 1, 2, 3, 4, 6, 7, 8)}


def test_a_plan_is_written_for_people_and_read_back(tmp_path):
    path = tmp_path / "plan.yaml"
    allocation = Allocation("separate", LAYOUTS, RANKS, {"encoder": "full"})
    write_plan(allocation, path, "two lines\nof comment")
    assert path.read_text() == (
        "# two lines\n"
        "# of comment\n"
        "placement: separate\n"
        "roles:\n"
        "  encoder:\n"
        "    layout: {data: 3, shard: replicate}\n"
        "    ranks: 5, 9-10\n"
        "    recompute: full\n"
        "  backbone:\n"
        "    layout: {data: 2, tensor: 2, pipeline: 2, shard: zero1}\n"
        "    ranks: 0-4, 6-8\n"
    )
    assert read_plan(path) == allocation


@pytest.mark.parametrize(
    "allocation",
    [
        Allocation("colocated", {"encoder": Layout(), "backbone": Layout()}, {"encoder": (0,), "backbone": (0,)}),
        Allocation(
            "separate",
            {"encoder": Layout(), "backbone": Layout(2, shard="fsdp")},
            {"encoder": (1,), "backbone": (0, 2)},
            offload={"encoder": "activations", "backbone": "all"},
        ),
        Allocation("mixed", {"encoder": Layout(3), "backbone": Layout(2)}, {"encoder": (0, 1, 2), "backbone": (0, 2)}),
        Allocation(
            "separate",
            {"encoder_image": Layout(), "encoder_audio": Layout(), "backbone": Layout(2)},
            {"encoder_image": (1,), "encoder_audio": (3,), "backbone": (0, 2)},
        ),
    ],
)
def test_every_placement_survives_its_file(tmp_path, allocation):
    write_plan(allocation, tmp_path / "plan.yaml", "")
    assert read_plan(tmp_path / "plan.yaml") == allocation


ENCODER = "encoder: {layout: {data: 1}, ranks: 1}"
BACKBONE = "backbone: {layout: {data: 1}, ranks: 0}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "is no plan; it must have 'placement' and 'roles'"),
        ("a: [", "cannot be read as a plan"),
        (f"placement: apart\nroles: {{{ENCODER}, {BACKBONE}}}", "no placement 'apart'; choose from"),
        (f"placement: separate\nroles: {{{BACKBONE}}}", "needs layouts for 'encoder', 'backbone'"),
        (f"placement: separate\nroles: {{encoder: 3, {BACKBONE}}}", "role 'encoder' must have 'layout' and 'ranks'"),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 2}}, ranks: 1}}, {BACKBONE}}}",
            r"layout \(data 2, replicate\) needs 2 ranks, but the role has 1: \[1\]",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{dat: 2}}, ranks: 1}}, {BACKBONE}}}",
            "layout of the role 'encoder' has no 'dat'; it has data, tensor, pipeline, context, shard",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: 2, ranks: 1}}, {BACKBONE}}}",
            "role 'encoder' has a layout without names; a layout has data, tensor",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}, ranks: 1, lanes: 2}}, {BACKBONE}}}",
            "role 'encoder' has no 'lanes'; it has layout, ranks, recompute, offload",
        ),
        (
            f"placement: separate\nnodes: 2\nroles: {{{ENCODER}, {BACKBONE}}}",
            "a plan has no 'nodes'; it has placement, roles",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}, ranks: 1, recompute: all}}, {BACKBONE}}}",
            "encoder cannot recompute 'all'; choose from 'none', 'selective', 'full'",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: two}}, ranks: 1}}, {BACKBONE}}}",
            "has data 'two'; it must be a whole number",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{shard: much}}, ranks: 1}}, {BACKBONE}}}",
            "cannot shard by 'much'",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}, ranks: last}}, {BACKBONE}}}",
            "has ranks 'last'; write them as in '0-5, 8-13'",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}, ranks: 0}}, {BACKBONE}}}",
            "share no rank, but both roles have rank 0",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_with_both_sides(tmp_path, text, words):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(AllocationError, match=words) as refusal:
        read_plan(path)
    assert "plan.yaml" in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(AllocationError, match=r"nowhere\.yaml cannot be read"):
        read_plan(tmp_path / "nowhere.yaml")
