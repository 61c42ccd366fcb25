"""Optimizers whose moments are kept in 8 bits."""

from __future__ import annotations

import pytest
import torch

from flowtrain_lightning.trainer.optimizer_refusals import refuse_optimizers
from tests.checkpoint.conftest import seen_by
from tests.checkpoint.test_resume import same
from tests.exactness.data import write_steps
from tests.forks import Job, run_jobs


def test_with_moments_in_8_bits_a_run_trains_and_goes_on_to_the_bit(tmp_path):
    pytest.importorskip("bitsandbytes")
    write_steps(tmp_path / "data")
    data, train = str(tmp_path / "data"), "tests.lightning.eight_bits:train"
    jobs = [
        Job("auto", train, 1, {"data": data, "layout": "auto"}),
        Job("1+1", train, 2, {"data": data, "layout": "1+1"}),
    ]
    done = run_jobs(tmp_path, jobs)
    saved = str(done["1+1"].check().folder / "saved.ckpt")
    (resumed,) = run_jobs(tmp_path, [Job("on", train, 2, {"data": data, "layout": "1+1", "resume": saved})]).values()
    alone = seen_by(done["auto"].check().folder)
    straight, on = ([seen_by(run.check().folder, rank) for rank in range(2)] for run in (done["1+1"], resumed))
    assert all(rank["quantised"] > 0 for rank in straight)
    assert sum(rank["quantised"] for rank in straight) == alone["quantised"]
    assert straight[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3)  # rounding may end in another of 256 steps
    assert alone["losses"][-1] < alone["losses"][0]
    for one, other in zip(straight, on, strict=True):
        assert one["losses"][-len(other["losses"]) :] == other["losses"]
        assert same(one["weights"], other["weights"])


def test_moments_that_checkpoints_cannot_hold_are_refused():
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    with pytest.raises(TypeError, match=r"torchao's AdamW8bit .*Take bitsandbytes\.optim\.AdamW8bit"):
        refuse_optimizers([kind([torch.nn.Parameter(torch.zeros(2))])])
