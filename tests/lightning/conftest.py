"""What these tests share: records, and the runs of all collected tests, made at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lightning.layout_runs import LayoutRuns
from tests.lightning.run_context import RunContext, write_data


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records for all stages of a Trainer."""
    return write_data(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="session")
def layout_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data_folder: Path
) -> LayoutRuns:
    """Runs, made when the first test asks for one: all of a layout in one start of its processes."""
    modules = {item.module: None for item in request.session.items if isinstance(item, pytest.Function)}
    runs = {run: layouts for module in modules for run, layouts in getattr(module, "LAYOUTS_OF_RUNS", {}).items()}
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs"
    folder.mkdir(exist_ok=True)
    return LayoutRuns(runs, folder, data_folder)


@pytest.fixture
def one_rank(tmp_path: Path, data_folder: Path) -> RunContext:
    """flowtrain on one rank, in this process."""
    return RunContext("one", tmp_path, data_folder)
