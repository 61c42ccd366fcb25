"""However features and gradients pass between devices, training gives the same to the last bit."""

import json

import pytest

from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs


@pytest.mark.parametrize("layout", ["1+1", pytest.param("2+3", marks=pytest.mark.full)])
def test_training_over_device_memory_or_late_copies_gives_the_same_bits(tmp_path, layout):
    write_steps(tmp_path / "data")
    arguments = {"data": str(tmp_path / "data"), "layout": layout}
    jobs = [
        Job("host", "tests.exactness.train:train", ranks_of(layout), arguments),
        Job("device", "tests.pool.device.training:train_over_device", ranks_of(layout), arguments),
        Job("copies", "tests.pool.device.training:train_over_copies", ranks_of(layout), arguments),
    ]
    done = run_jobs(tmp_path, jobs)
    host, device, copies = (read_run(done[name].check().folder) for name in ("host", "device", "copies"))
    assert same_bits(host, device)
    assert same_bits(host, copies)
    counts = [json.loads(path.read_text()) for path in sorted(done["device"].folder.glob("counts*.json"))]
    assert all(count["device"] for count in counts), "features on one side, gradients on the other"
    assert all(json.loads(path.read_text()) for path in done["copies"].folder.glob("copies*.json"))
