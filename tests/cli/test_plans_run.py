"""Every plan that ``flowtrain plan --out`` writes is one that a Trainer of as many devices starts and trains on."""

from __future__ import annotations

import sys

import pyarrow
import pytest
from pyarrow import parquet

from flowtrain_lightning.allocator import Allocation, Layout, ModelledCosts
from flowtrain_lightning.allocator.plan_file import read_plan, write_plan
from flowtrain_lightning.cli import main
from flowtrain_lightning.cli.plan_choice import choose_plans, kinds_alike
from flowtrain_lightning.placement.cluster_part import part_of
from tests.allocator.problems import problems
from tests.forks import Job, read_down, run_jobs
from tests.tiny import write_records

RANKS = 4
LARGE = """
encoders:
  image: {layers: 24, hidden: 2048, feed_forward: 8192, heads: 16, patch: 16, merge: 2}
backbone: {layers: 32, hidden: 4096, feed_forward: 11008, heads: 32, vocabulary: 32000}
"""
ASKED = {
    "small": ("--model", "qwen2-vl-2b", "--device", "h200"),
    "whole": ("--model", "qwen2.5-vl-3b", "--whole-copies"),
    "large": ("--model", "large.yaml", "--device", "h200"),
    "nodes": ("--model", "large.yaml", "--device", "b200", "--nodes", "2"),
    "frozen": ("--model", "large.yaml", "--device", "h200", "--freeze", "tower"),
}
"""What is planned, for four devices each."""

VIDEOS = ("--data", "videos.parquet", "--token-budget", "32768")
LONG = ("--data", "long.parquet", "--token-budget", "60000")
DIVIDED = {
    "few": ("--model", "grouped.yaml", "--device", "h200", "--batch", "2"),
    "long": ("--model", "large.yaml", "--device", "h200", "--batch", "2", *LONG),
    "videos": ("--model", "qwen2.5-vl-7b", "--device", "h200", "--batch", "2", *VIDEOS),
    "offloaded": ("--model", "qwen2-vl-2b", "--device", "h200", "--offload-activations"),
}
"""More of it: few samples, which tensor ranks share; long ones, which context ranks do, also of clips; activations on
the host."""

FAR = ("--device", "h100", "--nodes", str(RANKS), "--precision", "bf16-true")
IN_STAGES = {
    "far": ("--model", "qwen2.5-vl-3b", *FAR, "--batch", "4"),
    "two": ("--model", "qwen2.5-vl-7b", *FAR, "--batch", "256"),
    "split": ("--model", "internvl3-8b", *FAR, "--batch", "4"),
}
"""Plans in stages."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Name -> the file that was written."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "large.yaml").write_text(LARGE)
    write_plans(folder, ASKED)
    costs = ModelledCosts(problems("qwen2-vl-2b", devices=RANKS))
    mixed = next(plan for plan in choose_plans(costs).recommended.predictions if plan.kind == "mixed")
    write_plan(mixed.allocation(RANKS), folder / "mixed-plan.yaml", "the best that training runs of its kind")
    return {name: folder / f"{name}-plan.yaml" for name in (*ASKED, "mixed")}


def write_plans(folder, asked):
    """Has the command write a file for each of what is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, options in asked.items():
            command = ["flowtrain", "plan", *options, "--devices", str(RANKS), "--out", f"{name}-plan.yaml"]
            patch.setattr(sys, "argv", command)
            main()


def test_they_differ_in_placement_in_sharding_and_in_what_they_recompute(plans):
    allocations = [read_plan(path) for path in plans.values()]
    layouts = {layout for allocation in allocations for layout in allocation.layouts.values()}
    assert {allocation.placement for allocation in allocations} == {"separate", "colocated", "mixed"}
    assert layouts >= {Layout(RANKS), Layout(RANKS, shard="fsdp"), Layout(RANKS, shard="fsdp", replicas=2)}
    assert {how for allocation in allocations for how in allocation.recompute.values()} == {"none", "selective", "full"}


def test_a_plan_of_each_placement_trains(plans, tmp_path):
    of_placements = {read_plan(path).placement: path for path in plans.values()}
    train(list(of_placements.values()), tmp_path)


@pytest.mark.full
def test_all_of_them_train(plans, tmp_path):
    train(list(plans.values()), tmp_path)


@pytest.mark.full
def test_plans_of_tensor_and_context_ranks_and_of_the_hosts_memory_train(tmp_path):
    (tmp_path / "large.yaml").write_text(LARGE)
    (tmp_path / "grouped.yaml").write_text(LARGE.replace("heads: 32,", "heads: 32, key_value_heads: 2,"))
    long = {"tokens": [60000, 50000], "image_tokens": [[4096] * 8, [2048] * 4]}
    parquet.write_table(pyarrow.table(long), tmp_path / "long.parquet")
    clips = {"tokens": [32000, 30000], "image_tokens": [[2048] * 55, [2048] * 50]}  # an item for each moment
    parquet.write_table(pyarrow.table(clips), tmp_path / "videos.parquet")
    write_plans(tmp_path, DIVIDED)
    paths = {name: tmp_path / f"{name}-plan.yaml" for name in DIVIDED}
    backbones = {name: read_plan(path).layouts["backbone"] for name, path in paths.items()}
    assert (backbones["few"].tensor, backbones["long"].context) == (2, 4)
    videos = read_plan(paths["videos"])
    assert (videos.placement, videos.layouts["backbone"].context, videos.layouts["encoder"].data) == ("colocated", 4, 4)
    assert read_plan(paths["offloaded"]).offload == dict.fromkeys(("encoder", "backbone"), "activations")
    train(list(paths.values()), tmp_path, divides=True)


def test_plans_of_stages_train(tmp_path):
    """Where devices have nodes of their own, so that weights and gradients would go over slow links."""
    write_plans(tmp_path, IN_STAGES)
    paths = {name: tmp_path / f"{name}-plan.yaml" for name in IN_STAGES}
    layouts = [read_plan(path).layouts for path in paths.values()]
    backbones = [(of_roles["backbone"].pipeline, of_roles["backbone"].schedule) for of_roles in layouts]
    assert backbones == [(4, "1f1b"), (2, "1f1b"), (4, "zb-h1")]
    assert [of_roles["encoder"].pipeline for of_roles in layouts] == [4, 1, 1]
    train(list(paths.values()), tmp_path, deep=True)


IN_SHARDS = ("--model", "qwen3-vl-30b-a3b", "--device", "b300", "--nodes", "2", "--precision", "bf16-true")


@pytest.mark.full
def test_a_plan_of_stages_whose_ranks_share_weights_trains(tmp_path):
    write_plans(tmp_path, {"shards": (*IN_SHARDS, "--batch", "32")})
    path = tmp_path / "shards-plan.yaml"
    backbone = read_plan(path).layouts["backbone"]
    assert (backbone.pipeline, backbone.shard) == (2, "fsdp")
    train([path], tmp_path, deep=True)


@pytest.mark.full
def test_a_file_in_which_deepspeed_shards_the_roles_trains(tmp_path):
    pytest.importorskip("deepspeed")
    layouts = {role: Layout(RANKS // 2, shard="deepspeed-2") for role in ("encoder", "backbone")}
    ranks = {"backbone": (0, 1), "encoder": (2, 3)}
    write_plan(Allocation("separate", layouts, ranks), tmp_path / "deepspeed-plan.yaml", "by hand: none is printed")
    train([tmp_path / "deepspeed-plan.yaml"], tmp_path, imports="deepspeed")


IN_TWO = """
encoders:
  image: {layers: 24, hidden: 1152, feed_forward: 4608, heads: 18, patch: 16, merge: 2}
  audio: {layers: 24, hidden: 640, feed_forward: 2560, heads: 10, bins: 80}
backbone: {layers: 32, hidden: 4096, feed_forward: 11008, heads: 32, key_value_heads: 2, vocabulary: 32000}
"""
"""Its heads are divided among two ranks at most."""

OMNI = {
    "whole": ("--model", "qwen2.5-omni-3b", "--device", "b300", "--whole-copies"),
    "shared": ("--model", "qwen2.5-omni-7b", "--device", "h200"),
    "frozen": ("--model", "qwen2.5-omni-7b", "--device", "h100", "--freeze", "tower"),
    "few": ("--model", "in_two.yaml", "--device", "h200", "--batch", "2"),
}
"""Of models with an encoder of images and one of audio."""


@pytest.mark.full
def test_plans_of_models_that_see_and_hear_train(tmp_path):
    (tmp_path / "in_two.yaml").write_text(IN_TWO)
    write_plans(tmp_path, OMNI)
    paths = {name: tmp_path / f"{name}-plan.yaml" for name in OMNI}
    layouts = {name: read_plan(path).layouts for name, path in paths.items()}
    assert all(set(each) == {"encoder_image", "encoder_audio", "backbone"} for each in layouts.values())
    assert layouts["whole"]["backbone"].is_whole_copies
    assert layouts["shared"]["backbone"].shard == "fsdp"
    assert {layout.tensor for layout in layouts["few"].values()} == {2}
    train(list(paths.values()), tmp_path, divides=True, hears=True)


DRAWS = {
    "shards": ("--devices", "8"),
    "tensor": ("--devices", "64"),
    "groups": ("--devices", "512", "--microbatches", "1024"),
}
"""Of a frozen language model whose queries a generator reads."""


@pytest.mark.full
def test_plans_of_models_that_draw_train_on_fewer_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layouts = {}
    for name, options in DRAWS.items():
        frozen = ("--freeze", "encoder", "--freeze", "backbone")
        command = ["flowtrain", "plan", "--model", "metaquery-7b", *frozen, *options, "--out", f"{name}.yaml"]
        monkeypatch.setattr(sys, "argv", command)
        main()
        whole = read_plan(tmp_path / f"{name}.yaml")
        layouts[name] = whole.layouts
        part, _ = part_of(whole, RANKS)
        assert {role: _kinds(each) for role, each in part.layouts.items()} == {
            role: _kinds(each) for role, each in whole.layouts.items()
        }
        write_plan(part, tmp_path / f"{name}-part.yaml", "the same kinds of degree on fewer ranks")
    assert {layout.shard for layout in layouts["shards"].values()} == {"fsdp"}
    assert layouts["tensor"]["backbone"].tensor == 2
    assert layouts["groups"]["generator"].replicas > 1
    costs = ModelledCosts(problems("metaquery-3b", devices=RANKS, device="h200"))
    apart = next(plan for plan in choose_plans(costs).recommended.predictions if plan.kind == "separate")
    write_plan(apart.allocation(RANKS), tmp_path / "apart-part.yaml", "roles on ranks of their own")
    train([tmp_path / f"{name}-part.yaml" for name in (*DRAWS, "apart")], tmp_path, divides=True, draws=True)


def tabled(folder, model, **asked):
    """Writes each plan that a printed table has, whichever is recommended; file -> its allocation."""
    costs = ModelledCosts(problems(model, devices=RANKS, **asked))
    folder.mkdir()
    found = {}
    for number, (plan, _) in enumerate(kinds_alike(choose_plans(costs).recommended.predictions)):
        path = folder / f"{number}-plan.yaml"
        found[path] = plan.allocation(RANKS)
        write_plan(found[path], path, f"{plan.name}, of a table")
    return found


FEW = {"precision": "bf16-true", "global_batch_size": RANKS}
"""A sample a device: which tensor ranks share, of one half or of both."""

TABLES = {
    "qwen2.5-vl-3b": {"device": "a100", **FEW},
    "smolvlm2-2.2b": {"precision": "bf16-true", "global_batch_size": 2 * RANKS},
    "qwen2.5-vl-7b": {"frozen": ("backbone",), "global_batch_size": 8 * RANKS},
}
"""Model -> of what, with halves in unlike layouts among the plans."""


@pytest.mark.full
@pytest.mark.parametrize("model", TABLES)
def test_every_plan_of_a_table_trains_also_where_halves_are_laid_out_unlike(tmp_path, model):
    allocations = tabled(tmp_path / model, model, **TABLES[model])
    assert {"separate", "colocated"} <= {one.placement for one in allocations.values()}
    assert any(_kinds(one.layouts["encoder"]) != _kinds(one.layouts["backbone"]) for one in allocations.values())
    train(list(allocations), tmp_path / model, divides=True)


@pytest.mark.full
def test_every_plan_of_a_table_with_two_encoders_trains(tmp_path):
    allocations = tabled(
        tmp_path / "many", "qwen2.5-omni-3b", device="h200", precision="bf16-true", global_batch_size=8 * RANKS
    )
    few = tabled(tmp_path / "few", "qwen2.5-omni-3b", device="h200", frozen=("tower",), **FEW)
    assert {one.placement for one in allocations.values()} == {"separate", "colocated", "mixed"}
    assert any(one.layouts["backbone"].tensor > 1 for one in few.values() if one.placement == "separate")
    for folder, plans in (("many", allocations), ("few", few)):
        train(list(plans), tmp_path / folder, divides=True, hears=True)


@pytest.mark.full
def test_plans_of_mixtures_of_experts_train(tmp_path):
    asked = {"device": "b300", "precision": "bf16-true", "global_batch_size": 8 * RANKS}
    allocations = tabled(tmp_path / "plans", "qwen3-vl-30b-a3b", **asked)
    backbones = {one.layouts["backbone"] for one in allocations.values()}
    assert Layout(RANKS, shard="fsdp", expert=RANKS) in backbones
    train(list(allocations), tmp_path / "plans", mixes=True)


def _kinds(layout):
    """How a role is divided, whatever its number of data ranks."""
    return layout.tensor, layout.context, layout.shard


def train(paths, tmp_path, *, imports=None, **kind):
    """Trains on every plan, and compares on what each rank says it has trained. Of a ``kind``, see `train_on_plans`."""
    write_records(tmp_path, 24)
    plans = [str(path) for path in paths]
    arguments = {"data": str(tmp_path), "plans": plans, "ranks": RANKS, **kind}
    job = Job("train", "tests.cli.running_plans:train_on_plans", RANKS, arguments, imports=imports)
    done = run_jobs(tmp_path, [job])["train"].check()
    for trained in read_down(done.folder):
        for path in paths:
            found = trained[str(path)]
            assert found == {"allocation": read_plan(path).state_dict(), "steps": 2}
