"""The command ``flowtrain plan``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from lightning import Trainer

from flowtrain_lightning.allocator import graph_of
from flowtrain_lightning.allocator.devices import fewest_nodes
from flowtrain_lightning.allocator.modelled import ModelledCosts
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.cli import main
from flowtrain_lightning.cli.train_command import BriefParser
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.placement.request import make_request, why_it_cannot_run

MODEL = ("--model", "smolvlm-2.2b", "--device", "h200")

DIMENSIONS = """
encoders:
  image: {layers: 12, hidden: 768, feed_forward: 3072, heads: 12, patch: 16, merge: 2}
  audio: {layers: 6, hidden: 512, feed_forward: 2048, heads: 8, bins: 80}
backbone: {layers: 16, hidden: 1024, feed_forward: 4096, heads: 16, key_value_heads: 4, vocabulary: 32000}
"""

DEVICE = """
like: a100
memory: 40e9
per_node: 4
"""


MINE = """
placement: colocated
roles:
  encoder: {layout: {data: 8}, ranks: 0-7, recompute: full}
  backbone: {layout: {data: 8}, ranks: 0-7, recompute: full}
"""

TWO_ENCODERS = """
encoders:
  image: {layers: 12, hidden: 768, feed_forward: 3072, heads: 12, patch: 16, merge: 2}
  audio: {layers: 6, hidden: 512, feed_forward: 2048, heads: 8, bins: 80}
backbone: {layers: 16, hidden: 1024, feed_forward: 4096, heads: 16, vocabulary: 32000}
"""

HEARS = """
encoders:
  image: {layers: 27, hidden: 1152, feed_forward: 4304, heads: 16, patch: 14, merge: 2}
  audio: {layers: 32, hidden: 1280, feed_forward: 5120, heads: 20, bins: 128}
backbone: {layers: 28, hidden: 3584, feed_forward: 18944, heads: 28, key_value_heads: 4, vocabulary: 152064}
"""

TEXT = "backbone: {layers: 16, hidden: 1024, feed_forward: 4096, heads: 16, vocabulary: 32000}"


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Plans in this process, in a folder of its own; answers with what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", "plan", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_it_prints_what_a_renter_asks_and_bars_where_they_are_wanted(plan):
    printed = plan(*MODEL, "--devices", "8", "--verbose")
    for words in ("smolvlm-2.2b (encoder 0.43B, backbone 1.81B) on 8 h200, 8 a node", "typical lengths, assumed"):
        assert words in printed
    assert "in 32 microbatches of up to 8,192 tokens" in printed
    assert re.search(r"a step +[0-9.]+ s; 80 % of measured ones from .* samples/s", printed)
    assert re.search(r"memory +[0-9.]+ GB of the 141.1 GB of a device that can be planned for", printed)
    head = next(line for line in printed.splitlines() if "s/step" in line)
    assert head.split() == ["s/step", "samples/s", "80", "%", "band", "devices", "MFU", "peak", "GB"]
    assert sum(line.startswith("> ") for line in printed.splitlines()) == 1
    assert printed.count("Recommended: ") == 1
    bars = ("Layouts (", "Memory of a device, GB", "Step, s", "overhead")
    assert all(words in printed for words in bars)
    assert not any(words in plan(*MODEL, "--devices", "8") for words in bars)


def test_one_plan_by_two_names_stands_on_one_line(plan):
    printed = plan("--model", "qwen2.5-vl-7b", "--devices", "8")
    assert "uniform = colocated" in printed
    assert "Recommended: uniform (every device has all roles, in one layout)" in printed
    assert (
        len([line for line in printed.splitlines() if re.match(r"[> ] (uniform|colocated|separate|mixed)", line)]) < 4
    )


def test_the_command_that_trains_on_the_plan_is_one_that_the_command_line_takes(plan, tmp_path, monkeypatch):
    printed = plan(*MODEL, "--devices", "8", "--out", "plan.yaml")
    options = printed[printed.index("flowtrain fit") :].split()[2:]
    assert options[:2] == ["--config", "config.yaml"]
    parser = BriefParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(FlowDataModule, "data")
    given = parser.parse_args([*options[2:], "--data.train=records.jsonl"])
    assert given.trainer.devices == "8" or given.trainer.devices == 8
    assert Path(given.trainer.strategy.init_args.allocation) == Path("plan.yaml")
    assert (given.data.token_steps.microbatches, given.data.token_budget) == (32, 8192)


def test_json_has_every_figure(plan):
    values = json.loads(plan(*MODEL, "--devices", "8", "--json"))
    assert list(values["plans"]) == ["uniform", "colocated", "separate", "mixed"]
    assert values["token_budget"] == 8192
    best = values["plans"][values["recommended"]]
    assert 0 < best["mfu"] < 1
    assert best["samples_per_second"] == pytest.approx(values["samples"] / best["step_seconds"], rel=0.01)
    assert set(best["roles"]) == {"encoder", "backbone"}
    assert best["roles"]["backbone"]["seconds"]["forward"] > 0


def test_json_has_the_keys_that_the_page_on_planning_names(plan):
    values = json.loads(plan(*MODEL, "--devices", "8", "--json"))
    one = values["plans"][values["best"]]
    role = one["roles"]["backbone"]
    named = {key for table in (values, one, role, role["layout"], role["seconds"], role["bytes"]) for key in table}
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    documented = page[page.index("### In JSON") :].split("\n## ")[0]
    assert named <= set(re.findall(r"`([a-z_0-9]+)`", documented))


def test_the_plan_that_is_written_can_be_read_back(plan, tmp_path):
    plan(*MODEL, "--devices", "8", "--out", "plan.yaml")
    allocation = read_plan(tmp_path / "plan.yaml")
    assert max(allocation.ranks["backbone"]) < 8
    assert (tmp_path / "plan.yaml").read_text().startswith("# smolvlm-2.2b on 8 h200, 8 a node")


def test_a_plan_that_training_does_not_run_yet_says_so_wherever_it_is_told(plan, tmp_path):
    arguments = (*MODEL, "--devices", "2", "--precision", "transformer-engine")
    said = "None is recommended: training runs no plan that fits. The best one"
    assert said in plan(*arguments)
    assert json.loads(plan(*arguments, "--json"))["why_it_cannot_run"].startswith("is for precision")
    plan(*arguments, "--out", "plan.yaml")
    assert "# Training does not run it yet: it is for precision" in (tmp_path / "plan.yaml").read_text()
    assert "not yet" in plan(*arguments, "--sweep")


def test_the_plan_of_two_encoders_on_ranks_of_their_own_is_one_that_training_takes(plan, tmp_path):
    (tmp_path / "two.yaml").write_text(TWO_ENCODERS)
    values = json.loads(
        plan("--model", "two.yaml", "--device", "h100", "--devices", "8", "--json", "--out", "plan.yaml")
    )
    assert values["why_it_cannot_run"] is None
    request = make_request(tmp_path / "plan.yaml", None, None, "auto")
    assert request.answer(8, graph=graph_of(("encoder_image", "encoder_audio", "backbone"))) is not None


@pytest.mark.full
def test_a_plan_with_tensor_ranks_runs(plan):
    arguments = ("--model", "qwen2.5-vl-72b", "--device", "h100", "--devices", "24")  # too large without them
    values = json.loads(plan(*arguments, "--json"))
    assert values["why_it_cannot_run"] is None
    assert values["plans"][values["recommended"]]["roles"]["backbone"]["layout"]["tensor"] > 1


@pytest.mark.full
def test_a_plan_that_training_runs_says_nothing_against_it(plan, tmp_path):
    arguments = (*MODEL, "--devices", "8", "--token-budget", "4096", "--whole-copies")
    values = json.loads(plan(*arguments, "--json", "--out", "plan.yaml"))
    assert values["why_it_cannot_run"] is None
    assert "Training does not run" not in plan(*arguments)
    assert read_plan(tmp_path / "plan.yaml").recompute.keys() == {"encoder", "backbone"}


def test_the_best_plan_that_training_runs_comes_first(plan):
    values = json.loads(plan(*MODEL, "--devices", "8", "--json"))
    assert values["why_it_cannot_run"] is None
    assert all(one["runs"] for one in values["plans"].values() if one)
    faster = values["if_every_layout_ran"]
    assert faster is None or faster["step_seconds"] < values["plans"][values["recommended"]]["step_seconds"]


@pytest.mark.full
def test_a_layout_of_ones_own_is_shown_beside_the_best_plan(plan, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    arguments = (*MODEL, "--devices", "8", "--layout", "mine.yaml")
    printed = plan(*arguments, "--verbose")
    assert "Yours (colocated): " in printed
    assert "Layouts (colocated)\n  encoder   data 8, replicate; 8 devices; recompute full" in printed
    values = json.loads(plan(*arguments, "--json"))
    given = values["given"]
    assert given["step_seconds"] >= 0.94 * values["plans"][values["recommended"]]["step_seconds"]
    low, high = given["step_seconds_band"]
    assert low < given["step_seconds"] < high


@pytest.mark.full
def test_the_memory_that_a_layout_lacks_is_printed_to_a_tenth_of_a_percent(plan, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE.replace("full", "none"))
    printed = plan("--model", "qwen2.5-vl-3b", "--devices", "8", "--layout", "mine.yaml")
    assert re.search(r"It needs \d+\.\d % more memory than can be planned for on h100", printed)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("data: 8", "data: 4", "needs 4 ranks, but the role has 8"),
        ("recompute", "recomputes", "'recomputes' is not accepted; it has layout, ranks, recompute"),
        (
            "data: 8",
            "data: 8, sharded: 2",
            "'sharded' is not accepted; it has data, tensor, pipeline, context, shard, replicas",
        ),
        ("data: 8", "data: 1, pipeline: 8, virtual: 4", "27 layers cannot be divided among 32 pipeline stages"),
        ("data: 8", "data: 8, replicas: 2", "only 'fsdp' and 'zero3' shard weights in several groups"),
        ("0-7", "0-3", "needs 8 ranks, but the role has 4"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_both_sides(plan, tmp_path, old, new, words):
    (tmp_path / "mine.yaml").write_text(MINE.replace(old, new))
    with pytest.raises(SystemExit) as end:
        plan(*MODEL, "--devices", "8", "--layout", "mine.yaml")
    assert words in str(end.value.code)


@pytest.mark.full
def test_the_hours_and_the_cost_of_training_are_told_with_their_band(plan):
    arguments = (*MODEL, "--devices", "8", "--time-to-train", "1e9", "--price", "2.5")
    values = json.loads(plan(*arguments, "--json"))
    bill, best = values["bill"], values["plans"][values["recommended"]]
    assert bill["device_hours"] == pytest.approx(8 * bill["hours"])
    assert bill["cost"] == pytest.approx(2.5 * bill["device_hours"])
    assert bill["hours_high"] / bill["hours"] == pytest.approx(best["step_seconds_band"][1] / best["step_seconds"])
    printed = plan(*arguments)
    assert re.search(r"^[0-9.,]+ hours \(.*\) and [0-9,]+ USD for training on 1,000,000,000 tokens: ", printed, re.M)
    assert printed.index(" USD ") < printed.index("Recommended: ")
    assert " EUR for training" in plan(*arguments[:-1], "2.5EUR")


def test_large_figures_of_a_bill_have_no_exponents(plan):
    printed = plan(*MODEL, "--devices", "8", "--batch", "64", "--time-to-train", "1e13", "--price", "2.5")
    assert re.search(
        r"^[0-9]+,[0-9]{3} hours \([0-9,]+ to [0-9,]+\) and [0-9,]+ USD .*: [0-9,]+ device hours$", printed, re.M
    )
    assert "e+" not in printed


def test_samples_a_second_and_hours_are_those_of_steps_of_long_samples(plan, monkeypatch, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"tokens": [5000] * 1000, "image_tokens": [[2048]] * 1000}
    parquet.write_table(pyarrow.table(table), tmp_path / "long.parquet")
    common = ("--model", "qwen2-vl-2b", "--device", "h200", "--data", "long.parquet", "--json")
    planned = json.loads(plan(*common, "--devices", "4", "--out", "plan.yaml", "--time-to-train", "1e9"))
    monkeypatch.setattr(sys, "argv", ["flowtrain", "simulate", *common, "--plan", "plan.yaml"])
    main()
    simulated = json.loads(capsys.readouterr().out)
    rate = planned["plans"][planned["recommended"]]["samples_per_second"]
    assert rate == pytest.approx(simulated["samples_per_second"], rel=0.05)
    assert planned["bill"]["hours"] == pytest.approx(1e9 / simulated["tokens_per_second"] / 3600, rel=0.05)


@pytest.mark.full
def test_a_batch_too_small_for_the_devices_is_said_with_one_that_would_do(plan):
    arguments = (*MODEL, "--devices", "512")
    assert "A step of 32 microbatches is small for 512 devices: --microbatches 512 would" in plan(*arguments)
    assert json.loads(plan(*arguments, "--microbatches", "512", "--json"))["smallest_full_batch"] is None
    assert "The batch of 256 samples is small for 512 devices: " in plan(*arguments, "--batch", "256")
    enough = json.loads(plan(*arguments, "--json"))["smallest_full_batch"]
    assert json.loads(plan(*arguments, "--batch", str(enough), "--json"))["smallest_full_batch"] is None


def test_a_plan_of_fewer_devices_says_so_and_only_nodes_that_it_starts_on_are_paid(plan):
    arguments = (*MODEL, "--devices", "512", "--batch", "8", "--time-to-train", "1e9", "--price", "1")
    values = json.loads(plan(*arguments, "--json"))
    devices = values["plans"][values["recommended"]]["devices"]
    assert devices < 512
    assert values["bill"]["device_hours"] == pytest.approx(values["bill"]["hours"] * 8 * fewest_nodes(devices, 8))
    assert f"It takes {devices} of the 512 devices: on more, no plan that training runs is" in plan(*arguments)


def test_a_plan_of_fewer_devices_starts_on_equal_nodes_that_are_there(plan, tmp_path):
    arguments = ("--model", "qwen2.5-omni-3b", "--devices", "12", "--nodes", "3", "--batch", "3")
    printed = plan(*arguments, "--out", "plan.yaml")
    each, nodes = (int(re.search(rf"--trainer.{name}=(\d+)", printed)[1]) for name in ("devices", "num_nodes"))
    allocation = read_plan(tmp_path / "plan.yaml")
    assert (each * nodes, nodes <= 3, each <= 4) == (allocation.size, True, True)
    for role, layout in allocation.layouts.items():
        ranks = allocation.ranks[role]
        groups = [ranks[first : first + layout.tensor] for first in range(0, len(ranks), layout.tensor)]
        assert all(len({rank // each for rank in group}) == 1 for group in groups), "tensor ranks share a node"


@pytest.mark.full
def test_a_searched_token_budget_is_no_slower_than_the_default(plan):
    arguments = (*MODEL, "--devices", "8", "--json")
    searched, default = (json.loads(plan(*arguments, *more)) for more in (("--token-budget", "search"), ()))
    rates = [one["plans"][one["recommended"]]["samples_per_second"] for one in (searched, default)]
    assert (1 + ModelledCosts.margin) * rates[0] >= rates[1], "nearer budgets cannot be told apart"


@pytest.mark.full
def test_pictures_are_drawn(plan, tmp_path):
    pytest.importorskip("matplotlib")
    plan(*MODEL, "--devices", "4", "--plot", "plan.png")
    plan(*MODEL, "--devices", "4", "--sweep", "--plot", "sweep.png")
    for name in ("plan.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_sweep_has_every_power_of_two_and_the_end(plan):
    found = json.loads(plan(*MODEL, "--devices", "24", "--sweep", "--json"))
    assert [each["devices"] for each in found] == [1, 2, 4, 8, 16, 24]
    rates = [each["samples_per_second"] for each in found if each["placement"]]
    assert rates == sorted(rates)


@pytest.mark.full
def test_a_sweep_says_where_nothing_fits(plan):
    assert "does not fit" in plan("--model", "qwen2.5-vl-7b", "--devices", "8", "--sweep")
    found = json.loads(plan("--model", "qwen2.5-vl-7b", "--devices", "8", "--sweep", "--json"))
    assert len({tuple(each) for each in found}) == 1, "the keys are the same where nothing fits"


def test_a_sweep_searches_the_token_budget_of_each_number_of_devices(plan):
    arguments = ("--model", "qwen2-vl-2b", "--device", "b200", "--devices", "2", "--sweep")
    usual, searched = (json.loads(plan(*arguments, *more, "--json")) for more in ((), ("--token-budget", "search")))
    assert {each["token_budget"] for each in usual} == {8192}
    assert searched[-1]["token_budget"] == 16384
    assert "16,384" in plan(*arguments, "--token-budget", "search")


def test_a_config_file_dimensions_and_a_device_of_ones_own_are_read(plan, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2-vl-2b"]))
    (tmp_path / "small.yaml").write_text(DIMENSIONS)
    (tmp_path / "mine.yaml").write_text(DEVICE)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "my-model/config.json")
    printed = plan("--model", "my-model/config.json", "--devices", "8")
    assert printed.startswith("my-model (encoder 0.66B, backbone 1.54B)")
    printed = plan("--model", "small.yaml", "--device", "mine.yaml", "--devices", "8", "--nodes", "2")
    assert "on 8 mine, 4 a node" in printed
    assert "encoder_audio" in printed
    assert "encoder_image" in printed


def test_lengths_come_from_a_file(plan, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tokens = np.array([100, 300, 200])
    media = pyarrow.array([[64], [], [256, 128]])
    parquet.write_table(pyarrow.table({"tokens": tokens, "image_tokens": media}), tmp_path / "lengths.parquet")
    arguments = (*MODEL, "--devices", "4", "--batch", "30", "--data", "lengths.parquet")
    printed = plan(*arguments)
    assert "30 samples, 4,480 tokens of the encoder and 6,000 tokens of the backbone, in micro" in printed
    assert "data: lengths.parquet." in printed
    assert " --data.global_batch_size=30 " in printed


def test_a_file_says_which_media_items_are_the_same_and_they_are_planned_once(plan, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"tokens": [400] * 100, "image_tokens": [[1024]] * 100, "image_content": [[n // 5] for n in range(100)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "lengths.parquet")
    arguments = (*MODEL, "--devices", "4", "--batch", "20", "--data", "lengths.parquet")
    grouped = json.loads(plan(*arguments, "--group-by", "media", "--json", "--out", "plan.yaml"))
    assert "20 samples, 4,096 tokens of the encoder and" in plan(*arguments, "--group-by", "media")
    assert "20 samples, 13,769 tokens of the encoder and" in plan(*arguments)  # 1 - (1 - 1/5)^5 of them, by chance
    del columns["image_content"]
    parquet.write_table(pyarrow.table(columns), tmp_path / "lengths.parquet")
    assert "20 samples, 20,480 tokens of the encoder and" in plan(*arguments)
    plain = json.loads(plan(*arguments, "--json"))
    seconds = [found["plans"][found["recommended"]]["step_seconds"] for found in (grouped, plain)]
    assert seconds[0] < seconds[1]


def test_a_file_of_lengths_is_planned_in_the_steps_that_a_data_module_makes_of_it(plan, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"tokens": [1000] * 700, "image_tokens": [[64]] * 700}
    parquet.write_table(pyarrow.table(table), tmp_path / "lengths.parquet")
    printed = plan(*MODEL, "--devices", "4", "--data", "lengths.parquet")
    assert "A step has about 65 samples, " in printed
    assert "in 8 microbatches of up to 8,192 tokens" in printed
    assert " --data.token_steps.microbatches=8 " in printed


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"lengths": [3]}, "has no column 'tokens' (its columns: lengths)"),
        ({"tokens": [3, None]}, "The column 'tokens' of lengths.parquet must hold whole numbers, none missing"),
        ({"tokens": [3]}, "has no column 'image_tokens' or 'media_tokens' (its columns: tokens)"),
        ({"tokens": [3], "image_tokens": [5]}, "'image_tokens' of lengths.parquet must hold lists of whole numbers"),
        ({"tokens": [3], "media_tokens": [[0.5]]}, "must hold lists of whole numbers, but holds list<"),
        ({"tokens": [3], "media_tokens": [[]]}, "The data must have image media of at least one token"),
        ({"tokens": [3], "image_tokens": [[4, None]]}, "at least 0, none missing, but sample 0 has None"),
        ({"tokens": [3], "image_tokens": [[4]], "image_content": [[]]}, "of sample 0 it lists 0 for 1"),
        ({"tokens": [3], "image_tokens": [[4]], "image_content": [["a"]]}, "must hold lists of whole numbers, but"),
        ({"tokens": [9000], "media_tokens": [[64]]}, "longest sample has 9,000 tokens, but a microbatch takes 8,192"),
    ],
)
def test_lengths_that_cannot_be_used_end_with_a_sentence(plan, tmp_path, columns, words):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), tmp_path / "lengths.parquet")
    with pytest.raises(SystemExit) as end:
        plan(*MODEL, "--devices", "4", "--data", "lengths.parquet")
    assert words in str(end.value.code)


def test_a_token_budget_is_searched_for_steps_that_fill_microbatches_too(plan):
    assert re.search(
        r"in \d+ microbatches of up to [0-9,]+ tokens", plan(*MODEL, "--devices", "8", "--token-budget", "search")
    )


def test_a_searched_token_budget_takes_samples_of_any_length(plan, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"tokens": [20000, 500], "image_tokens": [[4096, 1024], []]}
    parquet.write_table(pyarrow.table(table), tmp_path / "lengths.parquet")
    printed = plan(*MODEL, "--devices", "8", "--data", "lengths.parquet", "--token-budget", "search", "--batch", "16")
    assert "Recommended:" in printed


@pytest.mark.full
def test_a_layout_of_ones_own_is_told_also_where_nothing_fits(plan, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE.replace("{data: 8}", "{data: 8, shard: fsdp}, offload: weights"))
    with pytest.raises(SystemExit) as end:
        plan("--model", "qwen2.5-vl-72b", "--devices", "8", "--layout", "mine.yaml")
    words = re.search(r"Yours \(colocated\): .* s a step \(.*\), and (.*) GB of the 80.4", str(end.value.code))
    assert words is not None
    assert float(words[1]) < 80.4


def test_one_device_and_one_sample_are_told_as_one(plan):
    printed = plan(*MODEL, "--devices", "1", "--batch", "1")
    assert "A step has 1 sample, " in printed
    assert "  1 device, whole weights" in printed


def test_a_token_budget_that_is_no_number_is_told_what_it_may_be(plan, capsys):
    with pytest.raises(SystemExit):
        plan(*MODEL, "--devices", "8", "--token-budget", "many")
    assert "'many' is neither a number of tokens nor 'search'" in capsys.readouterr().err


@pytest.mark.full
def test_what_is_frozen_is_not_trained(plan):
    def seconds(*more):
        return json.loads(plan(*MODEL, "--devices", "8", "--json", *more))["plans"]["colocated"]["step_seconds"]

    assert seconds("--freeze", "encoder") < seconds("--freeze", "tower") < seconds()


def test_whole_copies_keep_to_what_replicates(plan):
    values = json.loads(plan(*MODEL, "--devices", "8", "--token-budget", "4096", "--json", "--whole-copies"))
    for one in values["plans"].values():
        for role in one["roles"].values() if one else ():
            assert role["layout"]["shard"] == "replicate"
            assert role["layout"]["tensor"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt-2", "--devices", "8"), "flowtrain plan: There is no model 'gpt-2'."),
        (("--model", "nowhere.json", "--devices", "8"), "nowhere.json cannot be read"),
        ((*MODEL, "--devices", "0"), "There are 0 devices; plans are made for 1 to 65,536."),
        (
            (*MODEL, "--devices", "12"),
            "12 devices cannot be divided into nodes of 8, as is usual for",
        ),
        ((*MODEL, "--devices", "1000000000"), "There are 1,000,000,000 devices; plans are made for 1 to 65,536."),
        ((*MODEL, "--devices", "12", "--sweep"), "12 devices cannot be divided into nodes of 8"),
        (
            (*MODEL, "--devices", "8", "--group-by", "media"),
            "but the data name no two that are the same: give a column",
        ),
        ((*MODEL, "--devices", "8", "--sweep", "--out", "plan.yaml"), "--out writes one plan, but --sweep makes many"),
        (
            (*MODEL, "--devices", "8", "--sweep", "--layout", "mine.yaml"),
            "--layout is for one number of devices, but --sweep plans for many",
        ),
        ((*MODEL, "--devices", "8", "--nodes", "3"), "8 devices cannot be divided into 3 equal nodes"),
        (("--model", "smolvlm-2.2b", "--devices", "8", "--device", "h300"), "There is no device 'h300'. Did you mean"),
        ((*MODEL, "--devices", "8", "--freeze", "tail"), "There is no half 'tail' to freeze; choose from encoder"),
        ((*MODEL, "--devices", "8", "--freeze", "encoder", "--freeze", "backbone"), "nothing trains; freeze less"),
        ((*MODEL, "--devices", "8", "--token-budget", "0"), "token_budget is 0"),
        ((*MODEL, "--devices", "8", "--price", "2"), "--price needs --time-to-train, which says for how many tokens"),
        ((*MODEL, "--devices", "8", "--time-to-train", "-1"), "--time-to-train is -1; it must be a number above 0"),
        ((*MODEL, "--devices", "8", "--time-to-train", "1", "--price", "0"), "--price is 0; it must be a number above"),
        ((*MODEL, "--devices", "8", "--data", "nowhere.parquet"), "there is no file nowhere.parquet"),
        ((*MODEL, "--devices", "8", "--out", "no/where.yaml"), "no/where.yaml cannot be written"),
        (
            (*MODEL, "--devices", "8", "--time-to-train", "1", "--price", "2.5 euros"),
            "--price is 2.5 euros; it must",
        ),
        (("--model", "text.yaml", "--devices", "8", "--out", "plan.yaml"), "text has no encoder; leave it out"),
    ],
)
def test_a_mistake_ends_with_a_sentence(plan, tmp_path, arguments, words):
    (tmp_path / "text.yaml").write_text(TEXT)
    with pytest.raises(SystemExit) as end:
        plan(*arguments)
    assert words in str(end.value.code)


def refused(plan, *arguments):
    with pytest.raises(SystemExit) as end:
        plan(*arguments)
    return str(end.value.code)


@pytest.mark.full
def test_what_fits_on_the_devices_at_hand_is_named_before_more_of_them(plan, tmp_path):
    said = refused(plan, "--model", "qwen2.5-vl-72b", "--devices", "8")
    assert said.endswith("without any of this the smallest number that would do is 24.")
    offered = re.search(r"On these it fits with (.*); without", said)[1].split(" or ")[-1].split(", ")
    assert any("--lora 16 --frozen-bf16" in each for each in offered) or "--lora" in said
    option = re.search(r"(--lora 16 --frozen-bf16(?: --token-budget \d+)?)", said)[1]
    assert "Recommended: " in plan("--model", "qwen2.5-vl-72b", "--devices", "8", *option.split())


@pytest.mark.full
def test_a_smaller_token_budget_is_found_where_the_usual_one_does_not_fit(plan, tmp_path):
    (tmp_path / "small.yaml").write_text("{like: h100, memory: 24e9, per_node: 1}")
    arguments = ("--model", "qwen2.5-vl-7b", "--lora", "16", "--frozen-bf16", "--freeze", "encoder")
    arguments = (*arguments, "--device", "small.yaml", "--devices", "1")
    budget = int(re.search(r"On these it fits with --token-budget (\d+)", refused(plan, *arguments))[1])
    assert budget < 8192
    assert f"up to {budget:,} tokens" in plan(*arguments, "--token-budget", "search")


def test_fewer_encoder_batches_are_kept_where_usual_ones_do_not_fit(plan, tmp_path):
    arguments = ("--model", "qwen3-vl-8b", "--device", "l40s", "--devices", "5", "--nodes", "1")
    assert "--encoder-activations 1" in refused(plan, *arguments, "--encoder-activations", "4")
    printed = plan(*arguments, "--out", "plan.yaml")
    kept = read_plan(tmp_path / "plan.yaml").encoder_activations
    assert 1 <= kept < 4, "what trains on it keeps as few"
    assert f"activations of {kept} encoder batch" in printed
    assert json.loads(plan(*arguments, "--json"))["encoder_activations"] == kept


def test_what_fits_with_an_encoder_in_stages_alone_is_planned(plan):
    values = json.loads(plan("--model", "qwen2.5-vl-7b", "--device", "l40s", "--devices", "4", "--json"))
    assert values["plans"][values["recommended"]]["roles"]["encoder"]["layout"]["pipeline"] > 1


def test_smaller_encoder_batches_are_found_where_the_usual_ones_do_not_fit(plan, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"tokens": [1200] * 32, "image_tokens": [[1000]] * 32}
    parquet.write_table(pyarrow.table(table), tmp_path / "lengths.parquet")
    (tmp_path / "small.yaml").write_text("{like: h100, memory: 16e9, per_node: 1}")
    arguments = ("--model", "qwen2.5-vl-3b", "--lora", "16", "--frozen-bf16", "--data", "lengths.parquet")
    arguments = (*arguments, "--device", "small.yaml", "--devices", "2", "--batch", "32")
    patches = re.search(r"fits with --encoder-budget (\d+)", refused(plan, *arguments))[1]
    assert 1000 <= int(patches) < 16384
    planned = plan(*arguments, "--encoder-budget", patches)
    assert "Recommended: " in planned
    assert f"--data.encoder_budget={patches}" in planned, "what trains on it has the same batches"


@pytest.mark.full
@pytest.mark.parametrize("devices", ["8", "16"])
def test_two_encoders_beside_a_backbone_of_seven_billion_are_planned_as_they_run(plan, tmp_path, devices):
    (tmp_path / "hears.yaml").write_text(HEARS)
    plan("--model", "hears.yaml", "--devices", devices, "--out", "plan.yaml")
    assert why_it_cannot_run(read_plan(tmp_path / "plan.yaml")) is None
    assert read_plan(tmp_path / "plan.yaml").layouts["backbone"].shard == "fsdp"  # whole copies fit on none


def test_what_a_plan_keeps_on_the_host_stands_in_its_file(plan, tmp_path):
    plan(*MODEL, "--devices", "2", "--offload-activations", "--out", "plan.yaml")
    allocation = read_plan(tmp_path / "plan.yaml")
    assert allocation.offload == dict.fromkeys(("encoder", "backbone"), "activations")
    assert set(allocation.recompute.values()) == {"none"}


def test_states_that_training_keeps_nowhere_but_on_the_device_are_not_said_to_run(plan):
    values = json.loads(plan(*MODEL, "--devices", "2", "--optimizer", "adamw-offloaded", "--json"))
    assert values["recommended"] is None
    assert values["why_it_cannot_run"].startswith("keeps the optimizer's states alone in the host's memory")


def test_of_devices_that_few_samples_do_not_fill_a_smaller_number_is_taken(plan, tmp_path):
    (tmp_path / "text.yaml").write_text(TEXT)
    values = json.loads(plan("--model", "text.yaml", "--devices", "7", "--batch", "4", "--json"))
    assert values["plans"][values["recommended"]]["devices"] <= 4


def test_a_mixture_of_text_is_not_sent_to_lightning_in_a_layout_that_divides_experts(plan, tmp_path):
    experts = "experts: {count: 128, chosen: 8, feed_forward: 768}"
    (tmp_path / "mixture.yaml").write_text(TEXT.replace("vocabulary: 32000", f"vocabulary: 32000, {experts}"))
    values = json.loads(plan("--model", "mixture.yaml", "--devices", "8", "--json"))
    if values["recommended"] is not None:
        assert values["plans"]["uniform"]["roles"]["backbone"]["layout"]["expert"] == 1


def test_a_language_model_is_planned_and_sent_to_lightnings_own_strategies(plan, tmp_path):
    (tmp_path / "text.yaml").write_text(TEXT)
    printed = plan("--model", "text.yaml", "--devices", "8", "--time-to-train", "1e9")
    assert printed.startswith("text (backbone 0.33B) on 8 h100")
    assert "hours (" in printed
    assert "train it with Lightning's own " in printed
    assert json.loads(plan("--model", "text.yaml", "--devices", "8", "--json"))["recommended"] == "uniform"


@pytest.mark.full
def test_a_sweep_warns_of_batches_too_small_and_tells_hours_and_cost(plan):
    arguments = (*MODEL, "--devices", "64", "--batch", "32", "--sweep", "--time-to-train", "1e9", "--price", "2")
    printed = plan(*arguments)
    assert "The batch of 32 samples is small for " in printed
    assert printed.splitlines()[0].split()[-2:] == ["hours", "cost"]
    assert " USD" in printed.splitlines()[1]
