"""`benchmarks/beside_hf.py` at a tiny size: all learn the same tokens, so that losses can stand side by side."""

from __future__ import annotations

import json

import numpy as np
import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.data import IGNORED_LABEL
from tests.benchmarks.running import run

pytest.importorskip("transformers")
pytest.importorskip("trl")

from benchmarks.hf_model import as_rows, processor, write_model, write_records
from benchmarks.hf_variants import pad

SAMPLES = 6


def test_all_read_the_same_tokens_and_learn_the_same(tmp_path):
    write_model(tmp_path / "model", "tiny")
    write_records(tmp_path / "train.jsonl", SAMPLES, 500)
    data = flow.FlowDataModule(tmp_path / "train.jsonl", token_budget=4096, global_batch_size=SAMPLES, shuffle=False)
    data.read_as(flow.models.from_pretrained(tmp_path / "model"))
    data.setup("fit")
    samples = data.train_dataloader().steps.samples
    padded = pad(processor(tmp_path / "model"), list(as_rows(tmp_path / "train.jsonl")))
    for sample in range(SAMPLES):
        sizes = samples.source.sizes(np.array([sample]))
        ours = samples.sequence(samples.source.record(sample), int(sizes.tokens[0]), sizes.media_rows)
        theirs = padded["attention_mask"][sample].bool()
        assert padded["input_ids"][sample][theirs].tolist() == ours.tokens.tolist()
        assert padded["labels"][sample][theirs][1:].tolist() == ours.labels[:-1].tolist()
        assert (ours.labels != IGNORED_LABEL).any()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("beside-hf")
    return run("beside_hf.py", out), json.loads((out / "beside-hf.json").read_text())


@pytest.mark.full
def test_everybody_is_measured_in_the_same_way(compared):
    printed, results = compared
    assert set(results["runs"]) == {"trainer", "sft", "flowtrain"}
    for (figures,) in results["runs"].values():
        assert all(value > 0 for value in figures.values())
    assert "CPU s per sample" in printed


@pytest.mark.full
def test_losses_on_one_process_are_those_of_the_trainers_of_hugging_face(compared):
    losses = {name: found["loss"] for name, found in compared[1]["losses"].items()}
    ours = losses.pop("flowtrain, 1")
    for name in ("transformers.Trainer, 1", "TRL SFTTrainer, 1", "flowtrain, 2"):
        assert losses[name] == pytest.approx(ours, rel=1e-5), name


@pytest.mark.full
def test_on_two_processes_the_trainer_of_transformers_learns_from_another_mean(compared):
    losses = compared[1]["losses"]
    ours, theirs = losses["flowtrain, 2"], losses["transformers.Trainer, 2"]
    assert theirs["loss"][0] == pytest.approx(ours["loss"][0], rel=1e-5), "before the first step weights are equal"
    assert theirs["said"][0] != pytest.approx(ours["loss"][0], rel=1e-6)
    assert theirs["loss"][-1] != pytest.approx(ours["loss"][-1], rel=1e-6)
