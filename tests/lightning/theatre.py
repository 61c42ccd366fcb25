"""Plays scenes on layouts in real processes, and hands over what every rank noted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.stage import DEVICES, Stage

ROOT = Path(__file__).parents[2]
SECONDS = 400
"""The longest that all scenes of a layout may take, on a machine that does other work as well."""

Notes = list[dict[str, Any]]
"""What each rank noted."""


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
        with launch([*command, str(self._data_folder), *scenes], log) as process, suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        return log.read_text(errors="replace")[-20000:]


@contextmanager
def launch(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command that prints into ``log``, with more environment variables; at the end nothing of it is left."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
