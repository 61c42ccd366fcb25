"""Processes that tests start find the packages that the tests themselves were told to find."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import Job, read_down, run_jobs, write_down
from tests.paths import ROOT, python_path

CALL = """
from pathlib import Path
from tests import test_forks
test_forks.ask_a_rank(Path({folder!r}))
"""


def look_for_module(folder: Path) -> None:
    write_down(folder, importlib.import_module("elsewhere").VALUE)


def ask_a_rank(folder: Path) -> None:
    run_jobs(folder, [Job("one", "tests.test_forks:look_for_module", 1)])["one"].check()


@pytest.mark.parametrize(("given", "found"), [(None, str(ROOT)), ("", str(ROOT)), ("/a:/b", f"{ROOT}:/a:/b")])
def test_the_repository_comes_before_what_was_given(monkeypatch, given, found):
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    assert python_path() == found


@pytest.mark.full
def test_packages_that_lie_elsewhere_are_found_by_ranks_too(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/elsewhere.py").write_text("VALUE = 3\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    command = [sys.executable, "-c", CALL.format(folder=str(tmp_path))]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert read_down(tmp_path / "one") == [3]
