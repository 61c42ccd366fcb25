"""``import flowtrain_lightning`` makes the strategy known in every order of imports, and imports nothing slow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.registration import NAME

TRAINER = """
trainer = {trainer}(strategy="flowtrain", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
assert type(trainer.strategy) is flow.FlowTrainStrategy
"""


def run(script):
    """Runs a script in a fresh process."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("imports", "trainer"),
    [
        ("import flowtrain_lightning as flow\nimport lightning as L", "L.Trainer"),
        ("import lightning as L\nimport flowtrain_lightning as flow", "L.Trainer"),
        ("import flowtrain_lightning as flow\nfrom lightning.pytorch import Trainer", "Trainer"),
        ("import flowtrain_lightning as flow\nmodule = flow.FlowModule\nimport lightning as L", "L.Trainer"),
        ("import flowtrain_lightning as flow\nimport lightning.pytorch.strategies\nimport lightning as L", "L.Trainer"),
    ],
    ids=["flowtrain first", "lightning first", "from lightning", "a name before lightning", "the registry alone"],
)
def test_the_trainer_knows_the_strategy_in_every_order_of_imports(imports, trainer):
    run(f"{imports}\n{TRAINER.format(trainer=trainer)}")


def test_the_import_itself_loads_neither_torch_nor_lightning_and_leaves_no_hook():
    run(
        """if True:
        import sys
        import importlib.util
        import flowtrain_lightning
        assert not {"torch", "lightning", "numpy"} & set(sys.modules)
        importlib.util.find_spec("lightning.pytorch.strategies")  # looking for it is not loading it
        from lightning.pytorch.strategies import StrategyRegistry
        assert "flowtrain" in StrategyRegistry.available_strategies()
        assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("flowtrain")]
        assert "flowtrain_lightning.strategy" not in sys.modules
        """
    )


def test_planning_and_simulating_load_neither_torch_nor_lightning():
    package = Path(flow.__file__).parent
    rooms = [f"{room}.{file.stem}" for room in ("packing", "allocator") for file in (package / room).glob("[!_]*.py")]
    parts = [f"placement.{name}" for name in ("profile", "measured", "simulation", "request", "calibration")]
    imports = "\n".join(f"import flowtrain_lightning.{name}" for name in [*rooms, *parts])
    run(f"{imports}\nimport sys\nassert not {{'torch', 'lightning'}} & set(sys.modules)")


def test_the_stub_tells_type_checkers_the_names_that_there_are():
    stub = ast.parse(Path(flow.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = {alias.asname for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(flow.__all__)
    for name in names:
        assert getattr(flow, name) is not None
        assert name in dir(flow)


def test_a_name_that_does_not_exist_is_told_as_python_tells_it():
    with pytest.raises(AttributeError, match="module 'flowtrain_lightning' has no attribute 'Flow'"):
        _ = flow.Flow


def test_the_strategy_is_registered_by_its_own_name():
    assert flow.FlowTrainStrategy.strategy_name == NAME
