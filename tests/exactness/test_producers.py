"""Ranks whose steps producers make train to the same bits as ranks that load for themselves."""

from __future__ import annotations

import pytest

from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs

pytestmark = pytest.mark.full


@pytest.mark.parametrize("layout", ["1+2", "ddp 2"])
def test_losses_and_weights_are_equal_to_the_bit(tmp_path, layout, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_steps(tmp_path / "data")
    jobs = [
        Job(
            name,
            "tests.exactness.train:train",
            ranks_of(layout),
            {"data": str(tmp_path / "data"), "layout": layout, "settings": settings},
        )
        for name, settings in (("local", {}), ("produced", {"producers": "ray", "num_workers": 1}))
    ]
    done = run_jobs(tmp_path, jobs)
    local, produced = (read_run(done[name].check().folder) for name in ("local", "produced"))
    assert local.losses == produced.losses
    assert same_bits(local, produced)
