"""Guards: whatever the package uses that Lightning and PyTorch do not promise to keep is still there."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn

import flowtrain_lightning
from flowtrain_lightning.data.loading.dataloader import StepLoader
from flowtrain_lightning.runtime.health import HealthMonitor
from flowtrain_lightning.trainer.launcher import RankLauncher

PACKAGE = Path(flowtrain_lightning.__file__).parent

IMPORTS = {
    ("lightning.fabric.strategies.launchers.subprocess_script", "_HYDRA_AVAILABLE"),
    ("lightning.fabric.strategies.launchers.subprocess_script", "_basic_subprocess_cmd"),
    ("lightning.fabric.strategies.launchers.subprocess_script", "_hydra_subprocess_cmd"),
    ("lightning.fabric.utilities.distributed", "_set_num_threads_if_needed"),
    ("lightning.pytorch.strategies.launchers", "_SubprocessScriptLauncher"),
}
"""Private names that the package imports, of all packages but itself."""

STRATEGY = ("strategy.py", "trainer/role_checkpoints.py", "trainer/role_collectives.py")
"""A class and its bases in this package."""

INHERITED = {
    STRATEGY: {"_lightning_module"},
    ("trainer/launcher.py",): {"_check_can_spawn_children"},
    ("module.py",): set(),
}
"""Files of a class -> private attributes of its base classes in other packages that it uses."""

ASKED = {"_layer_sync", "_val_check_time_interval", "_model_registry", "_log_model", "_log_model_checkpoints"}
ASKED |= {"_clear_DTensor_sharding_propagator_cache"}
"""Private attributes that are looked up by name, to refuse what they say; and one that not every PyTorch has."""


def test_no_other_private_name_is_imported():
    assert {found for tree in _trees() for found in _private_imports(tree)} == IMPORTS


@pytest.mark.parametrize(("module", "name"), sorted(IMPORTS))
def test_a_private_name_is_still_there(module, name):
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("files", INHERITED, ids=lambda files: files[0])
def test_a_subclass_uses_no_other_private_attribute_of_its_base(files):
    assert _foreign_attributes([PACKAGE / file for file in files]) == INHERITED[files]


def test_no_other_private_attribute_is_looked_up_by_name():
    found = set()
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                name = node.args[1]
                found |= {name.value} if isinstance(name, ast.Constant) else set()
    assert {name for name in found if name.startswith("_") and not name.startswith("__")} == ASKED


def test_lightning_calls_and_keeps_what_our_strategy_relies_on():
    for name in ("_configure_launcher", "setup_environment", "setup_optimizers", "on_exception", "teardown"):
        assert callable(getattr(ParallelStrategy, name))
    fields = inspect.getsource(ParallelStrategy.__init__) + inspect.getsource(Strategy.__init__)
    for name in ("_layer_sync", "_launcher", "_lightning_module", "cluster_environment", "parallel_devices"):
        assert f"self.{name}" in fields
    assert "self.strategy.set_world_ranks()" in inspect.getsource(_AcceleratorConnector._lazy_init_strategy)


def test_a_trainer_knows_a_time_between_validations_under_the_name_that_we_ask_for():
    trainer = L.Trainer(val_check_interval="00:00:01:00", accelerator="cpu", logger=False)
    assert trainer._val_check_time_interval == 60
    assert L.Trainer(accelerator="cpu", logger=False)._val_check_time_interval is None


def test_lightnings_launcher_takes_and_keeps_what_ours_relies_on():
    launcher = RankLauncher(LightningEnvironment(), HealthMonitor(), 2, 1, check=lambda trainer: None)
    assert (launcher.num_processes, launcher.num_nodes, launcher.procs) == (2, 1, [])
    assert not inspect.signature(launcher._call_children_scripts).parameters


def test_a_trainer_finds_the_checkpoint_to_load_in_the_way_that_we_ask_for(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that nothing is started
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    launcher = RankLauncher(LightningEnvironment(), HealthMonitor(), 1, 1, check=lambda trainer: None)
    trainer.state.fn = TrainerFn.FITTING

    def fit(model: object, ckpt_path: object = None) -> None:
        """As the Trainer's, by the names of its arguments."""

    assert "ckpt_path" in inspect.signature(trainer._fit_impl).parameters
    (tmp_path / "hpc_ckpt_1.ckpt").mkdir()
    cases = {None: None, tmp_path / "a.ckpt": str(tmp_path / "a.ckpt"), "hpc": str(tmp_path / "hpc_ckpt_1.ckpt")}
    for given, found in cases.items():
        launcher.launch(fit, None, given, trainer=trainer)
        assert launcher.checkpoint(trainer) == found


def test_lightning_looks_whether_a_path_is_true_before_setup_and_when_it_reads_it():
    # `LastCheckpoint` is a path only once all ranks have agreed on it, in the strategy's setup.
    parses, reads = _CheckpointConnector._parse_ckpt_path, _CheckpointConnector.resume_start
    assert "if not ckpt_path:" in inspect.getsource(parses)
    assert "if not checkpoint_path:" in inspect.getsource(reads)
    run = inspect.getsource(L.Trainer._run)
    assert run.index("strategy.setup(self)") < run.index("restore_checkpoint_after_setup:", run.index("setup(self)"))


def test_lightning_sets_signal_handlers_after_setup_and_takes_them_back_at_the_end():
    run = inspect.getsource(L.Trainer._run)
    order = ["strategy.connect", "setup_environment", "_call_setup_hook", "_call_configure_model"]
    order += ["strategy.setup(self)", "register_signal_handlers", "_run_stage"]
    places = [run.index(name) for name in order]
    assert places == sorted(places)
    assert "_original_handlers" in inspect.getsource(_SignalConnector.teardown)


def test_a_group_beside_the_default_one_can_be_made_and_reduces_and_broadcasts():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    options, tensor = dist.AllreduceOptions(), torch.ones(2)
    options.reduceOp = dist.ReduceOp.SUM
    group.allreduce([tensor], options).wait()
    sending = dist.BroadcastOptions()
    sending.rootRank = 0
    group.broadcast([tensor], sending).wait()
    assert tensor.tolist() == [1, 1]


def test_lightning_leaves_a_loader_alone_that_is_no_pytorch_loader():
    assert not issubclass(StepLoader, torch.utils.data.DataLoader)
    assert "isinstance(dataloader, DataLoader)" in inspect.getsource(_DataConnector._prepare_dataloader)


@cache
def _trees() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]


def _private_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(PACKAGE.name):
            yield from ((node.module, alias.name) for alias in node.names if alias.name.startswith("_"))


def _foreign_attributes(files: list[Path]) -> set[str]:
    """Private attributes of ``self`` that the files read and nowhere define."""
    tree = ast.parse("\n".join(file.read_text().replace("from __future__ import annotations", "") for file in files))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" and node.attr.startswith("_"):
            if isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif not node.attr.startswith("__"):
                read.add(node.attr)
    return read - defined
