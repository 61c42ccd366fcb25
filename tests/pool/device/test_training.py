"""However features and gradients pass between devices, training gives the same to the last bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flowtrain_lightning.pool import open_device_tier
from flowtrain_lightning.pool.device.device_entries import DeviceEntries
from flowtrain_lightning.pool.device.host_copies import HostCopies
from flowtrain_lightning.runtime import pool_capacity
from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.train import train
from tests.forks import Job, run_jobs
from tests.pool.device.simulated import simulated


def train_over_device(folder: Path, **settings: Any) -> None:
    """As `train`; besides writes how many entries lay in device memory and how many did not fit there."""
    counts = {"device": 0, "host": 0}
    put = DeviceEntries.put

    def counted(entries, *arguments):
        published = put(entries, *arguments)
        counts["host" if published is None else "device"] += 1
        return published

    def choose(choice, mesh, device, nbytes):
        return open_device_tier(mesh, simulated(mesh.rank), nbytes=1 << 13, required=True)

    DeviceEntries.put = counted
    pool_capacity.choose_device_tier = choose
    train(folder, **settings)
    (folder / f"counts{os.environ['RANK']}.json").write_text(json.dumps(counts))


def train_over_copies(folder: Path, **settings: Any) -> None:
    """As `train`, where each entry is copied to and from host memory by a device that is late; writes down how many."""
    copies = [0]
    write = HostCopies.write

    def counted(underway, *arguments):
        copies[0] += 1
        write(underway, *arguments)

    HostCopies.write = counted
    pool_capacity.runtime_of = lambda device: simulated(int(os.environ["RANK"]))
    train(folder, **settings)
    (folder / f"copies{os.environ['RANK']}.json").write_text(json.dumps(copies[0]))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1+1", pytest.param("2+3", marks=pytest.mark.full)])
def test_training_over_device_memory_or_late_copies_gives_the_same_bits(tmp_path, layout):
    write_steps(tmp_path / "data")
    arguments = {"data": str(tmp_path / "data"), "layout": layout}
    jobs = [
        Job("host", "tests.exactness.train:train", ranks_of(layout), arguments),
        Job("device", f"{__name__}:train_over_device", ranks_of(layout), arguments),
        Job("copies", f"{__name__}:train_over_copies", ranks_of(layout), arguments),
    ]
    done = run_jobs(tmp_path, jobs)
    host, device, copies = (read_run(done[name].check().folder) for name in ("host", "device", "copies"))
    assert same_bits(host, device)
    assert same_bits(host, copies)
    counts = [json.loads(path.read_text()) for path in sorted(done["device"].folder.glob("counts*.json"))]
    assert all(count["device"] for count in counts), "features on one side, gradients on the other"
    assert all(json.loads(path.read_text()) for path in done["copies"].folder.glob("copies*.json"))
