"""A training run whose entries lie in the memory of a simulated device; every rank writes down what it computed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flowtrain_lightning.pool import open_device_tier
from flowtrain_lightning.pool.device.device_entries import DeviceEntries
from flowtrain_lightning.pool.device.host_copies import HostCopies
from flowtrain_lightning.runtime import pool_capacity
from tests.exactness.train import train
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
