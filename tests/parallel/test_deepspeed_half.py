"""Halves that DeepSpeed optimizes: what a rank holds of gradients and states, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from flowtrain_lightning.parallel.deepspeed_half import DeepSpeedHalf
from tests.forks import Job, read_down, run_jobs


def test_where_deepspeed_is_missing_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install flowtrain-lightning\[deepspeed\]"):
        DeepSpeedHalf({"half": nn.Linear(2, 2)}, None, torch.device("cpu"), stage=1)


def test_ranks_share_states_and_by_zero_2_gradients_and_hear_of_mistakes(tmp_path):
    pytest.importorskip("deepspeed")
    done = run_jobs(tmp_path, [Job("shares", "tests.parallel.zero:shares", 2, imports="deepspeed")])["shares"].check()
    for rank, found in enumerate(read_down(done.folder)):
        for stage, by_stage in found.items():
            assert by_stage["states"] == pytest.approx(by_stage["weights"], rel=0.01)  # two for each weight of a half
            assert by_stage["kept"] == (by_stage["weights"] if stage == "1" else 0)
            assert by_stage["norm"] == pytest.approx(by_stage["expected"], rel=1e-5)
            assert by_stage["moved"] > 0
            assert by_stage["rested"]
            assert by_stage["in_place"]  # no second copy of the weights is kept
            said = by_stage["said"]
            assert said[0].startswith(
                "5 weights of a half in DeepSpeed's layout want a gradient, but the optimizer has"
            )
            assert said[1].startswith("The weight 'half.0.weight' got a gradient, but the optimizer does not have it")
            assert said[2].startswith("A hook was registered with `register_post_accumulate_grad_hook`")
            assert rank == 1 or said[3] == "the backward fails"
            assert "`requires_grad` of a parameter was changed after DeepSpeed took its half" in said[-1]
