"""How the ranks of a node are started, and what is refused before."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from flowtrain_lightning.runtime.health import HealthMonitor
from flowtrain_lightning.trainer.launcher import RankLauncher
from tests.processes import Ranks


@pytest.mark.parametrize("first", ["-c", "-", ""])  # python -c, python -, python < script.py
def test_what_no_other_rank_could_run_is_refused_before_any_starts(first, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [first])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    launcher = RankLauncher(
        LightningEnvironment(), HealthMonitor(), 2, 1, check=lambda trainer: pytest.fail("planned in vain")
    )
    with pytest.raises(MisconfigurationException, match=r"Save it as a file and run that, or set Trainer\(devices=1\)"):
        launcher.launch(pytest.fail)


def test_a_script_that_has_left_the_folder_of_its_start_is_told_how_to_be_found(tmp_path, monkeypatch):
    (script := tmp_path / "train.py").touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir((tmp_path / "other").mkdir() or tmp_path / "other")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script))
    launcher = RankLauncher(LightningEnvironment(), HealthMonitor(), 2, 1, check=pytest.fail)
    with pytest.raises(MisconfigurationException, match=f"Start it by its whole path, {script}"):
        launcher.launch(pytest.fail)


def launch_one(rank, ranks):
    """Starts a script as rank 1, which needs long before it could look after itself."""
    script = Path(os.environ["FOLDER"], "script.py")
    script.write_text(
        "import os, time\nopen(os.environ['FOLDER'] + '/child', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    sys.modules["__main__"].__spec__, sys.argv = None, [str(script)]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    launcher = RankLauncher(LightningEnvironment(), HealthMonitor(), 2, 1, check=lambda trainer: None)
    launcher.launch(lambda: time.sleep(600))


def test_a_rank_that_is_still_loading_ends_with_the_launcher():
    with Ranks(launch_one, 1) as ranks:
        ranks.wait_for("child")
        while not (text := (ranks.folder / "child").read_text()):
            time.sleep(0.01)
        child = psutil.Process(int(text))
        ranks.signal(0, signal.SIGKILL)
        child.wait(30)
