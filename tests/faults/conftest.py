"""Jobs over the same records."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault import Fault
from tests.faults.job import Job
from tests.tiny import write_records


@pytest.fixture(scope="package")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data that all jobs read."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 24, "train.jsonl")
    write_records(folder, 8, "val.jsonl", seed=1)
    return folder


@pytest.fixture
def job(tmp_path: Path, records: Path) -> Callable[..., Job]:
    """Makes a job that trains on the records and in which a fault happens, or none."""

    def make(fault: Fault | None = None, **settings: Any) -> Job:
        shutil.copytree(records, tmp_path / "data", dirs_exist_ok=True)
        return Job(tmp_path, fault, **settings)

    return make
