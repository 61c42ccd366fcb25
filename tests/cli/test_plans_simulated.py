"""What ``flowtrain plan`` predicts of a plan is what ``flowtrain simulate`` finds for its file on the same data."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from flowtrain_lightning.cli import main

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

CELLS = [0, 3, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 202))]
MODELS = ("smolvlm-2.2b", "qwen2-vl-2b", "qwen2.5-vl-3b", "qwen2.5-vl-7b", "gemma-3-4b")


@pytest.fixture
def flowtrain(monkeypatch, tmp_path, capsys):
    """Runs a command in this process, in a folder of its own; answers with the JSON that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", *map(str, arguments), "--json"])
        main()
        return json.loads(capsys.readouterr().out)

    return run


def write_lengths(draw, budget):
    """Samples of a few media items or none, whose lengths spread by a factor that is drawn."""
    count, spread = int(draw.integers(40, 400)), draw.uniform(0.1, 0.9)
    items = draw.integers(0, 4, count)
    media = [np.rint(draw.lognormal(6.0, spread, each)).astype(int).clip(16, 4096).tolist() for each in items]
    if not items.any():
        media[0] = [256]
    tokens = np.rint(draw.lognormal(6.0, spread, count)).astype(int) + [sum(each) // 4 for each in media]
    table = {"tokens": np.clip(tokens, 16, budget), "image_tokens": media}
    parquet.write_table(pyarrow.table(table), "lengths.parquet")


@pytest.mark.parametrize("seed", CELLS)
def test_a_plan_and_the_simulation_of_its_file_agree(flowtrain, seed):
    draw = np.random.default_rng(seed)
    budget, devices = int(draw.choice([4096, 8192])), int(draw.choice([2, 4, 8, 16]))
    frozen = ("--freeze", str(draw.choice(["encoder", "tower"]))) if draw.random() < 0.4 else ()
    batch = devices * int(draw.choice([2, 8, 24]))
    write_lengths(draw, budget)
    common = ("--model", draw.choice(MODELS), "--device", "h200", "--data", "lengths.parquet", *frozen)
    common = (*common, "--token-budget", budget, *(("--global-batch-size", batch) if seed % 2 else ()))
    planned = flowtrain("plan", *common, "--devices", devices, "--out", "plan.yaml")
    assert planned["recommended"] is not None
    simulated = flowtrain("simulate", *common, "--plan", "plan.yaml")
    predicted = planned["plans"][planned["recommended"]]["step_seconds"]
    assert predicted == pytest.approx(simulated["step_seconds"], rel=0.05)


LARGE_TOWER = """
encoders:
  image: {layers: 48, hidden: 3200, feed_forward: 12800, heads: 32, patch: 14, merge: 2}
backbone: {layers: 32, hidden: 4096, feed_forward: 11008, heads: 32, vocabulary: 32000}
"""


def test_they_agree_where_encoder_and_backbone_are_in_stages(flowtrain, tmp_path):
    (tmp_path / "model.yaml").write_text(LARGE_TOWER)
    draw = np.random.default_rng(0)
    table = {
        "tokens": draw.integers(1400, 1600, 64),
        "image_tokens": [[each] for each in draw.integers(1200, 1400, 64)],
    }
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    common = ("--model", "model.yaml", "--precision", "bf16-true", "--batch", 4, "--data", "lengths.parquet")
    nodes = ("--device", "h100", "--nodes", 4)
    planned = flowtrain("plan", *common, *nodes, "--devices", 4, "--out", "plan.yaml")
    recommended = planned["plans"][planned["recommended"]]
    assert recommended["roles"]["encoder"]["layout"]["pipeline"] > 1
    simulated = flowtrain("simulate", *common, *nodes, "--plan", "plan.yaml")
    assert recommended["step_seconds"] == pytest.approx(simulated["step_seconds"], rel=0.05)


SEES_AND_HEARS = """
encoders:
  image: {layers: 12, hidden: 768, feed_forward: 3072, heads: 12, patch: 16, merge: 2}
  audio: {layers: 6, hidden: 512, feed_forward: 2048, heads: 8, bins: 80}
backbone: {layers: 16, hidden: 1024, feed_forward: 4096, heads: 16, key_value_heads: 4, vocabulary: 32000}
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 24))])
def test_they_agree_where_several_encoders_take_media_of_their_own(flowtrain, tmp_path, seed):
    draw = np.random.default_rng(seed)
    (tmp_path / "model.yaml").write_text(SEES_AND_HEARS)
    table = {"tokens": draw.integers(50, 800, 300)}
    for column, most in (("image_tokens", 3), ("audio_tokens", 2)):
        of_each = [draw.integers(50, 2000, each) for each in draw.integers(0, most, 300)]
        table |= {column: of_each}
        table["tokens"] = table["tokens"] + [int(each.sum()) // 4 for each in of_each]
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    frozen = ("--freeze", "encoder") if draw.random() < 0.5 else ()
    common = ("--model", "model.yaml", "--data", "lengths.parquet", *frozen, "--batch", int(draw.choice([32, 96])))
    planned = flowtrain("plan", *common, "--devices", int(draw.choice([3, 4, 8])), "--out", "plan.yaml")
    simulated = flowtrain("simulate", *common, "--plan", "plan.yaml")
    predicted = planned["plans"][planned["recommended"]]["step_seconds"]
    assert predicted == pytest.approx(simulated["step_seconds"], rel=0.05)


def test_they_agree_where_many_ranks_have_few_samples(flowtrain):
    """Played in a part of 64 ranks a step would be a third longer, since there are few microbatches to divide."""
    draw = np.random.default_rng(1)
    media = np.rint(draw.lognormal(6.0, 0.6, 46)).astype(int).clip(16, 4096)
    parquet.write_table(pyarrow.table({"tokens": [233] * 46, "image_tokens": [[n] for n in media]}), "lengths.parquet")
    common = ("--model", "qwen3-vl-4b", "--data", "lengths.parquet", "--precision", "bf16-true")
    planned = flowtrain("plan", *common, "--devices", 96, "--nodes", 16, "--out", "plan.yaml")
    recommended = planned["plans"][planned["recommended"]]
    simulated = flowtrain("simulate", *common, "--plan", "plan.yaml", "--nodes", recommended["devices"] // 6)
    assert recommended["step_seconds"] == pytest.approx(simulated["step_seconds"], rel=0.05)


def test_they_agree_where_samples_of_a_step_share_media(flowtrain):
    table = {"tokens": [600] * 200, "image_tokens": [[2048]] * 200, "image_content": [[n // 5] for n in range(200)]}
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    common = ("--model", "qwen2-vl-2b", "--device", "h200", "--data", "lengths.parquet", "--batch", 40)
    seconds = []
    for grouped in (("--group-by", "media"), ()):
        planned = flowtrain("plan", *common, *grouped, "--devices", 4, "--out", "plan.yaml")
        simulated = flowtrain("simulate", *common, *grouped, "--plan", "plan.yaml")
        seconds.append(simulated["step_seconds"])
        assert planned["plans"][planned["recommended"]]["step_seconds"] == pytest.approx(seconds[-1], rel=0.05)
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("kept", [1, 4])
@pytest.mark.parametrize("frozen", ["encoder", "tower"])
def test_they_agree_on_frozen_encoders_of_shared_media_of_which_few_batches_are_kept(flowtrain, frozen, kept):
    draw = np.random.default_rng(kept)
    media = [[1024] * int(each) for each in draw.integers(1, 5, 240)]
    content = [draw.integers(0, 60, len(each)).tolist() for each in media]
    table = {"tokens": [300 + 256 * len(each) for each in media], "image_tokens": media, "image_content": content}
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    common = ("--model", "qwen2-vl-2b", "--device", "h200", "--data", "lengths.parquet", "--freeze", frozen)
    common = (*common, "--batch", 48, "--encoder-activations", kept, "--encoder-budget", 4096)
    planned = flowtrain("plan", *common, "--devices", 4, "--out", "plan.yaml")
    simulated = flowtrain("simulate", *common, "--plan", "plan.yaml")
    assert planned["plans"][planned["recommended"]]["step_seconds"] == pytest.approx(
        simulated["step_seconds"], rel=0.05
    )


@pytest.mark.parametrize(
    "trained", [("--lora", 16, "--frozen-bf16"), ("--optimizer", "adamw-8bit"), ("--freeze", "backbone", "--lora", 8)]
)
def test_they_agree_on_adapters_and_optimizers_which_simulate_takes_too(flowtrain, trained):
    table = {"tokens": [700] * 96, "image_tokens": [[1024]] * 96}
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    common = ("--model", "qwen2-vl-2b", "--device", "h100", "--data", "lengths.parquet", "--batch", 48, *trained)
    planned = flowtrain("plan", *common, "--devices", 4, "--out", "plan.yaml")
    simulated = flowtrain("simulate", *common, "--plan", "plan.yaml")
    assert planned["plans"][planned["recommended"]]["step_seconds"] == pytest.approx(
        simulated["step_seconds"], rel=0.05
    )


def test_they_agree_on_small_encoder_batches_which_take_longer(flowtrain):
    table = {"tokens": [700] * 96, "image_tokens": [[256] * 8] * 96}
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    common = ("--model", "qwen2-vl-2b", "--device", "h200", "--data", "lengths.parquet", "--batch", 96)
    seconds = []
    for budget in ((), ("--encoder-budget", 512)):
        planned = flowtrain("plan", *common, *budget, "--devices", 4, "--out", "plan.yaml")
        simulated = flowtrain("simulate", *common, *budget, "--plan", "plan.yaml")
        seconds.append(simulated["step_seconds"])
        assert planned["plans"][planned["recommended"]]["step_seconds"] == pytest.approx(seconds[-1], rel=0.05)
    assert seconds[1] > 1.1 * seconds[0]


def test_they_agree_where_hosts_decode_slower_than_devices_compute(flowtrain, tmp_path):
    table = {"tokens": [700] * 96, "image_tokens": [[2048]] * 96}
    parquet.write_table(pyarrow.table(table), "lengths.parquet")
    (tmp_path / "few.yaml").write_text("{like: h200, cores: 0.1}")
    common = ("--model", "qwen2-vl-2b", "--data", "lengths.parquet", "--batch", 96)
    seconds = []
    for device in ("h200", "few.yaml"):
        planned = flowtrain("plan", *common, "--device", device, "--devices", 4, "--out", "plan.yaml")
        simulated = flowtrain("simulate", *common, "--device", device, "--plan", "plan.yaml")
        seconds.append(simulated["step_seconds"])
        assert planned["plans"][planned["recommended"]]["step_seconds"] == pytest.approx(seconds[-1], rel=0.05)
        assert sum(simulated["shares"]["backbone"].values()) <= 1.001
    assert seconds[1] > 2 * seconds[0]
