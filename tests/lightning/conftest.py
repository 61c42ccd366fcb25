"""Plays the scenes of the collected tests: all scenes of one layout in one start of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.stage import DEVICES, Stage, write_data

ROOT = Path(__file__).parents[2]
SECONDS = 400
"""The longest that all scenes of a layout may take, on a machine that does other work as well."""

Notes = list[dict[str, Any]]
"""What each rank noted."""


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records for all stages of a Trainer."""
    return write_data(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="session")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Theatre:
    """Where scenes are played when the first test asks for one."""
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    scenes = {scene: layouts for module in modules for scene, layouts in getattr(module, "SCENES", {}).items()}
    return Theatre(scenes, tmp_path_factory.mktemp("scenes"), data_folder)


@pytest.fixture
def one_rank(tmp_path: Path, data_folder: Path) -> Stage:
    """flowtrain on one rank, in this process."""
    return Stage("one", tmp_path, data_folder)


class Theatre:
    """Plays scenes, each at most once on a layout.

    A scene is a function of a `Stage`; test modules list theirs in ``SCENES``, each with its layouts. A scene that
    fails takes its processes down; the scenes after it are played in new ones.
    """

    def __init__(self, scenes: dict[Callable[[Stage], None], tuple[str, ...]], folder: Path, data_folder: Path) -> None:
        self._scenes = scenes
        self._folder = folder
        self._data_folder = data_folder
        self._failures: dict[tuple[str, str], str] = {}
        self._played: set[str] = set()

    def seen(self, scene: Callable[[Stage], None], layout: str) -> Notes:
        """What each rank noted in a scene."""
        if layout not in self._played:
            self._play(layout)
            self._played.add(layout)
        if (layout, scene.__name__) in self._failures:
            pytest.fail(f"{scene.__name__} failed on {layout}:\n{self._failures[layout, scene.__name__]}")
        folder = self.folder(scene, layout)
        return [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(DEVICES[layout])]

    def folder(self, scene: Callable[[Stage], None], layout: str) -> Path:
        """Where a scene's Trainers wrote."""
        return self._folder / layout / scene.__name__

    def _play(self, layout: str) -> None:
        waiting = [scene for scene, layouts in self._scenes.items() if layout in layouts]
        while waiting:
            done = self._start(layout, [f"{scene.__module__}:{scene.__name__}" for scene in waiting])
            ended = [scene for scene in waiting if self._is_over(scene, layout)]
            waiting = waiting[len(ended) :]
            if waiting:
                self._failures[layout, waiting.pop(0).__name__] = done

    def _is_over(self, scene: Callable[[Stage], None], layout: str) -> bool:
        return all((self.folder(scene, layout) / f"notes-{rank}.json").exists() for rank in range(DEVICES[layout]))

    def _start(self, layout: str, scenes: list[str]) -> str:
        """Plays scenes in one start of the layout's processes; returns what they printed."""
        command = [sys.executable, "-m", "tests.lightning.stage", layout, str(self._folder / layout)]
        log = self._folder / f"{layout}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, str(self._data_folder), *scenes],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
        return log.read_text(errors="replace")[-20000:]
