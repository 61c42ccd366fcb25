"""An epoch's last, smaller step that is kept is exact, also where it has fewer samples than there are ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness.compare import error, read_run
from tests.exactness.data import GLOBAL_BATCH, STEPS, write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs

pytestmark = pytest.mark.full

FSDP = {"encoder": {"shard": "fsdp"}, "backbone": {"shard": "fsdp"}}


@pytest.mark.parametrize(
    ("layout", "roles"), [("ddp 2", {}), ("colocated 2", {}), ("1+2", {}), ("2+1", {}), ("colocated 2", FSDP)]
)
def test_a_step_of_one_sample_gives_the_gradients_of_one_process(tmp_path, layout, roles):
    write_steps(tmp_path / "data")
    kept = {"global_batch_size": GLOBAL_BATCH * STEPS - 1, "drop_last": False}
    given: dict[str, Any] = {"data": str(tmp_path / "data"), "settings": kept}
    jobs = [
        Job("auto", "tests.exactness.train:train", 1, {**given, "layout": "auto"}),
        Job(
            "ranks",
            "tests.exactness.train:train",
            ranks_of(layout),
            {**given, "layout": layout, "strategy": {"roles": roles}},
        ),
    ]
    done = run_jobs(tmp_path, jobs)
    alone, together = (read_run(done[name].check().folder) for name in ("auto", "ranks"))
    assert len(alone.gradients) == STEPS, "the second and the fourth are of one sample"
    assert max(error(*pair) for pair in zip(together.gradients, alone.gradients, strict=True)) <= 1e-9
    assert error(together.weights[-1], alone.weights[-1]) <= 1e-9
