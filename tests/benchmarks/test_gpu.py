"""`benchmarks/gpu.py` trains in all five ways on the same samples, and says all that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import figures, padded_samples, variants_table
from benchmarks.gpu_model import TINY, config_of, images_for, packed_model
from benchmarks.gpu_variants import VARIANTS, step_dataset
from benchmarks.modules import ROOT, Work
from benchmarks.padded import PaddedDataset
from benchmarks.pool_passing import measure_passing
from benchmarks.pool_report import passing_table
from flowtrain_lightning.allocator import ROLES
from tests.processes import assert_all_good, run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module", params=[1, 2], ids=["one device", "two devices"])
def printed(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--cpu", "--out", str(out)]
    command += ["--devices", str(request.param)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((out / "gpu-tiny.json").read_text())


@pytest.mark.full
def test_all_ways_train_and_are_told_beside_the_padded_one_and_the_loop(printed):
    text, results = printed
    assert list(results["runs"]) == list(VARIANTS)
    assert all(len(rounds) == 1 for rounds in results["runs"].values())
    assert results["failures"] == {}
    assert results["parts"].keys() == {"kernels", "pool", "passing", "waits"}
    assert results["parts"]["waits"]["waits"] == 0, "on a CPU"
    assert all(name in text for name in VARIANTS.values())
    assert "x plain loop" in text


@pytest.mark.full
def test_machine_workload_and_versions_are_told(printed):
    text, results = printed
    assert {"cpu", "torch", "lightning", "commit"} <= results["machine"].keys()
    assert results["workload"]["flops"] > 0
    assert "tiny on CPU; 2 steps of 8 samples" in text


def test_entries_pass_between_two_processes_beside_a_plain_copy(tmp_path):
    sizes = {64 << 10: 5, 256 << 10: 3}
    outcomes = run_ranks(pass_entries, 2, arguments=[tmp_path, sizes], deadline=120)
    assert_all_good(outcomes)
    found = json.loads((tmp_path / "passing.json").read_text())
    assert [one["bytes"] for one in found] == list(sizes)
    assert [one["through_host"] for one in found] == [10, 6], "all, without a GPU"
    for one in found:
        assert one["host_us"] > 0
        assert one["share"] == pytest.approx(2 * one["passed_gigabytes"] / one["copy_gigabytes"]), "of the one round"
    rows = passing_table(found).splitlines()
    assert "share of half a copy" in rows[0]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["64 KiB", "256 KiB"]


def pass_entries(rank: int, ranks: int, folder: Path, sizes: dict[int, int]) -> None:
    figures = measure_passing(rank, folder, torch.device("cpu"), sizes, rounds=1)
    if rank == 0:
        (folder / "passing.json").write_text(json.dumps(figures))
    else:
        assert figures == []


@pytest.mark.full
def test_padded_batches_have_the_loss_of_packed_ones(tmp_path):
    from benchmarks.padded_transformers import collate

    records = ROOT / "recipes/quickstart/data/train.jsonl"
    steps = step_dataset(Work(records, tmp_path, 8, 1024, images_for(TINY)))
    batch = steps.load(0, 0)
    torch.manual_seed(0)
    module = packed_model(TINY, recompute=False)
    module.configure_model()
    config = transformers.AutoConfig.for_model(**config_of(TINY))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.load_state_dict(module.model.state_dict())
    dataset = PaddedDataset(steps.samples)
    for packed, media in zip(batch.microbatches, batch.media["encoder"], strict=True):
        assert len(packed.samples) > 1
        features = {} if media is None else {"image": module.encode(media)}
        loss, tokens = module.backbone_step(packed, features, "train")
        padded = collate([dataset[sample] for sample in packed.samples])
        assert padded["attention_mask"].sum() == len(packed.tokens)
        theirs = model(**padded, num_items_in_batch=torch.tensor(tokens)).loss
        torch.testing.assert_close(theirs, loss / tokens, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "budget", "longest", "samples"),
    [(64, 8192, 1000, 8), (12, 3000, 1000, 3), (8, 500, 1000, 1), (8, 99, 1, 8)],
)
def test_a_padded_batch_has_as_many_of_the_longest_samples_as_the_budget_holds(batch, budget, longest, samples):
    assert padded_samples(batch, budget, longest) == samples


def test_rates_are_of_the_slowest_rank_and_ratios_of_devices():
    told = {"tokens": 1000, "flops": 400.0, "peak": 100.0}
    one = [{"seconds": 4.0, "memory": 7, "lanes": {}}]
    two = [
        {"seconds": 4.0, "memory": 5, "lanes": {"encoder stall": 1.0, "encoder compute": 3.0}},
        {"seconds": 2.0, "memory": 9, "lanes": {"backbone stall": 1.0, "backbone compute": 1.0}},
    ]
    rounds = {"loop": [figures(told, one, 1)], "separate": [figures(told, two, 2)]}
    assert rounds["separate"][0] == {
        "tokens_per_second": 250.0,
        "device_tokens_per_second": 125.0,
        "memory": 9,
        "mfu": 0.5,
        "encoder_stall": 0.25,
        "backbone_stall": 0.5,
    }
    separate = variants_table(rounds).splitlines()[-1].split("|")
    stalls = {"encoder": "25.0%", "backbone": "50.0%"}
    cells = ["2", "250", "50.0%", *(stalls[role] for role in ROLES), "0.0", "-", "0.50"]
    assert [cell.strip() for cell in separate[2:-1]] == cells
    shared = figures(told, two, 1)
    assert (shared["memory"], shared["device_tokens_per_second"]) == (14, 250.0), "both ranks on one device"
