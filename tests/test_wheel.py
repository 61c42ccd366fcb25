"""The wheel, in an environment of its own and away from the checkout, is all that a user needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.lightning.layout_runs import launch
from tests.recipes.test_qwen_vl import SECONDS, fit_arguments, folder

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

pytestmark = pytest.mark.full

__all__ = ["folder"]  # a fixture


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The ``bin`` of a new environment with the wheel; what it depends on is borrowed from this one."""
    source, place = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "flowtrain_lightning", source / "flowtrain_lightning")
    built = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(source)]
    subprocess.run(built, check=True)
    (wheel,) = tmp_path.glob("flowtrain_lightning-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    # Installing torch again would take minutes. A .pth file does not follow those of the folders that it names, so an
    # editable install of the checkout is not seen.
    borrowed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    python = str(place / "bin" / "python")
    into = [*PIP, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(into, check=True)
    return place / "bin"


def test_it_tells_of_the_machine_plans_and_trains_on_two_processes(installed, folder):
    log = folder / "log"
    for command in (
        [str(installed / "python"), "-c", "import flowtrain_lightning as flow; print(flow.__file__)"],
        [str(installed / "flowtrain"), "doctor"],
        [str(installed / "flowtrain"), "plan", "--model", "qwen2-vl-2b", "--devices", "8"],
        [str(installed / "flowtrain"), *fit_arguments(folder, "config.yaml", None, 2)],
    ):
        with launch(command, log, PYTHONPATH="") as process:
            assert process.wait(SECONDS) == 0, log.read_text()
        if "-c" in command:
            assert str(installed.parent) in log.read_text()
    assert list((folder / "runs").rglob("last.ckpt"))
