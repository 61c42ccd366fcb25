"""``import flowtrain_lightning`` makes the strategy known in every order of imports, and imports nothing slow."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.registration import NAME

ORDERS = {
    "flowtrain first": "import flowtrain_lightning as flow; import lightning as L",
    "lightning first": "import lightning as L; import flowtrain_lightning as flow",
    "a name before lightning": "import flowtrain_lightning as flow; flow.FlowModule; import lightning as L",
    "the registry alone": "import flowtrain_lightning as flow, lightning.pytorch.strategies; import lightning as L",
}

TRAINER = """
trainer = L.Trainer(strategy="flowtrain", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
assert type(trainer.strategy) is flow.FlowTrainStrategy
"""

HOOK = """
import importlib.util, sys, flowtrain_lightning
importlib.util.find_spec("lightning.pytorch.strategies")  # looking for it is not loading it
from lightning.pytorch.strategies import StrategyRegistry
assert "flowtrain" in StrategyRegistry.available_strategies()
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("flowtrain")]
assert "flowtrain_lightning.strategy" not in sys.modules
"""

IN_TURN = """
import json, os, sys, traceback
import torch._dynamo, torchmetrics  # which Lightning imports; they take nearly all of its time
failed = {}
for name, script in json.load(sys.stdin).items():
    end, beginning = os.pipe()
    if not os.fork():
        os.dup2(beginning, 1)
        try:
            exec(script, {})
        except BaseException:
            print(traceback.format_exc(), flush=True)
        os._exit(0)
    os.close(beginning)
    with os.fdopen(end) as said:
        failed[name] = said.read()
    assert os.wait()[1] == 0, name
assert not {"lightning", "flowtrain_lightning"} & set(sys.modules)
print(json.dumps(failed))
"""
"""Runs scripts, each in a process in which neither Lightning nor flowtrain has been imported; prints what they say."""


@pytest.fixture(scope="module")
def said():
    """What each script said, of those that import Lightning; nothing if all was well."""
    scripts = {"hook": HOOK, **{name: f"{imports}\n{TRAINER}" for name, imports in ORDERS.items()}}
    return json.loads(run(IN_TURN, json.dumps(scripts)))


def run(script, given=""):
    """Runs a script in a fresh process; what it prints."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ORDERS)
def test_the_trainer_knows_the_strategy_in_every_order_of_imports(said, order):
    assert said[order] == ""


def test_the_import_itself_loads_neither_torch_nor_lightning():
    run("import sys, flowtrain_lightning\nassert not {'torch', 'lightning', 'numpy'} & set(sys.modules)")


def test_when_lightning_is_imported_the_strategy_is_registered_and_no_hook_is_left(said):
    assert said["hook"] == ""


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
