"""`benchmarks/train.py` runs in both modes, at a tiny size, and says all that it promises."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("train")
    return run("train.py", out), json.loads((out / "train.json").read_text()), out


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    out = tmp_path_factory.mktemp("emulate")
    return run("train.py", out, "--emulate", "2"), json.loads((out / "emulate-2.json").read_text()), out


def test_all_variants_train_on_the_same_samples(trained):
    _, results, _ = trained
    runs = results["runs"]["tiny"]
    assert set(runs) == {"padded", "packed", "separate", "colocated"}
    targets_per_sample = {
        variant: round(figures["targets_per_second"] / figures["samples_per_second"], 9)
        for variant, (figures,) in runs.items()
    }
    assert len(set(targets_per_sample.values())) == 1, targets_per_sample


def test_only_the_padded_variant_pads_and_stalls_are_told_by_role(trained):
    _, results, _ = trained
    runs = {variant: figures for variant, (figures,) in results["runs"]["tiny"].items()}
    assert runs["padded"]["token_padding"] > 0.05
    assert all(runs[variant]["token_padding"] == 0 for variant in ("packed", "separate", "colocated"))
    assert {"encoder_stall", "backbone_stall"} <= runs["separate"].keys()


def test_the_table_has_ratios_and_the_results_name_machine_and_versions(trained):
    printed, results, out = trained
    assert "x padded" in printed
    assert "x packed" in printed
    assert {"cpu", "cores", "torch", "lightning", "commit"} <= results["machine"].keys()
    assert (out / "train.png").stat().st_size > 10_000


def test_emulated_steps_take_at_least_as_long_as_the_ideal_schedule(emulated):
    _, results, _ = emulated
    assert set(results["runs"]) == {"flowtrain", "sharded", "batch-synchronous", "mixed", "uniform"}
    for schedule, (figures,) in results["runs"].items():
        assert figures["ideal_seconds"] > 0.05, schedule
        assert figures["step_seconds"] > 0.95 * figures["ideal_seconds"], schedule


def test_encoding_a_whole_step_first_is_never_the_better_ideal(emulated):
    _, results, _ = emulated
    ideal = {schedule: figures["ideal_seconds"] for schedule, (figures,) in results["runs"].items()}
    assert ideal["batch-synchronous"] > ideal["flowtrain"]


def test_the_emulation_draws_its_schedules(emulated):
    printed, _, out = emulated
    assert "overhead" in printed
    assert (out / "emulate-2.png").stat().st_size > 10_000


def test_the_emulation_tells_the_cpu_time_of_ranks_per_microbatch(emulated):
    printed, results, _ = emulated
    assert "ranks' CPU ms per microbatch" in printed
    for schedule, (figures,) in results["runs"].items():
        assert 1e-4 < figures["user_seconds_per_microbatch"] < 1, schedule
        assert 0 <= figures["system_seconds_per_microbatch"] < 1, schedule
