"""What these tests share: records, and a theatre that plays the scenes of all collected tests at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lightning.stage import Stage, write_data
from tests.lightning.theatre import Theatre


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records for all stages of a Trainer."""
    return write_data(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="session")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Theatre:
    """Where scenes are played when the first test asks for one: all of a layout in one start of its processes."""
    modules = {item.module: None for item in request.session.items if isinstance(item, pytest.Function)}
    scenes = {scene: layouts for module in modules for scene, layouts in getattr(module, "SCENES", {}).items()}
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "scenes"
    folder.mkdir(exist_ok=True)
    return Theatre(scenes, folder, data_folder)


@pytest.fixture
def one_rank(tmp_path: Path, data_folder: Path) -> Stage:
    """flowtrain on one rank, in this process."""
    return Stage("one", tmp_path, data_folder)
