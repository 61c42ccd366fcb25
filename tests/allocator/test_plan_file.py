"""Plans as YAML."""

from __future__ import annotations

import subprocess
import sys

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
            "colocated",
            {"encoder": Layout(2), "backbone": Layout(pipeline=2)},
            {"encoder": (0, 1), "backbone": (0, 1)},
            order="searched",
            activation_bytes=3e10,
            encoder_activations=1,
        ),
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
        ("- 1", r"a plan must be names with values, but is \[1\]; it has placement, roles"),
        ("a: [", "cannot be read as a plan"),
        (
            f"placement: apart\nroles: {{{ENCODER}, {BACKBONE}}}",
            r"a plan cannot be used.*one of \['separate', 'colocated', 'mixed'\]. Got value: apart",
        ),
        (f"placement: separate\nroles: {{{BACKBONE}}}", "needs a role that encodes and one that reads features"),
        (
            f"placement: separate\nroles: {{encoder: 3, {BACKBONE}}}",
            "role 'encoder' must be names with values, but is 3; it has layout",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}}}, {BACKBONE}}}",
            "role 'encoder' cannot be used: .*required.*ranks.*; it has layout, ranks, recompute, offload",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 2}}, ranks: 1}}, {BACKBONE}}}",
            r"layout \(data 2, replicate\) needs 2 ranks, but the role has 1: \[1\]",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{dat: 2}}, ranks: 1}}, {BACKBONE}}}",
            "layout of the role 'encoder' cannot be used: .*'dat'.*; it has data, tensor, pipeline, context, shard",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: 2, ranks: 1}}, {BACKBONE}}}",
            "role 'encoder' cannot be used: .*Expected type dict. Got value: 2",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}, ranks: 1, lanes: 2}}, {BACKBONE}}}",
            "role 'encoder' cannot be used: .*'lanes'.*; it has layout, ranks, recompute, offload",
        ),
        (
            f"placement: separate\nnodes: 2\nroles: {{{ENCODER}, {BACKBONE}}}",
            "a plan cannot be used: .*'nodes'.*; it has placement, roles",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: 1}}, ranks: 1, recompute: all}}, {BACKBONE}}}",
            r"recompute.*one of \['none', 'selective', 'full'\]. Got value: all",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{data: two}}, ranks: 1}}, {BACKBONE}}}",
            "data.*Expected type int. Got value: two",
        ),
        (
            f"placement: separate\nroles: {{encoder: {{layout: {{shard: much}}, ranks: 1}}, {BACKBONE}}}",
            "shard.*one of .*'fsdp'.*Got value: much",
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


def test_a_plan_is_read_where_neither_torch_nor_lightning_is_imported(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(f"placement: separate\nroles: {{{ENCODER}, {BACKBONE}}}")
    script = f"""if True:
        import sys
        from pathlib import Path
        from flowtrain_lightning.allocator.plan_file import read_plan
        read_plan(Path({str(path)!r}))
        print({{"torch", "lightning"}} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
