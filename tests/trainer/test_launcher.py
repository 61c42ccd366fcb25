"""How the ranks of a node are started, and what is refused before."""

import sys

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from flowtrain_lightning.runtime.health import HealthMonitor
from flowtrain_lightning.trainer.launcher import RankLauncher


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
