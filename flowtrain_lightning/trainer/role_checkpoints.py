"""The strategy's checkpoints: each rank saves and loads the weights and optimizers of its roles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from flowtrain_lightning.checkpoint import load_checkpoint, load_half, remove_checkpoint, save_checkpoint
from flowtrain_lightning.checkpoint.background import BackgroundSave
from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer, load_optimizers
from flowtrain_lightning.checkpoint.summary import saved_time, time_of_save
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import held_state
from flowtrain_lightning.parallel.regions import ElementRun
from flowtrain_lightning.runtime.runner import RoleRunner
from flowtrain_lightning.trainer.launcher import RankLauncher
from flowtrain_lightning.trainer.refusals import refuse_storage_options
from flowtrain_lightning.trainer.role_collectives import RoleCollectives


class RoleCheckpoints(RoleCollectives):
    """Saves directories by role and parameter name; loads them, or plain Lightning checkpoints, into any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.background_saving = False
        self._rank_launcher: RankLauncher | None = None
        self._runner: RoleRunner | None = None
        self._named_optimizers: Sequence[NamedOptimizer] = ()
        self._saving: BackgroundSave | None = None
        self._saved_at = 0.0  # when the latest checkpoint of this run was saved, in seconds

    @property
    def flow_module(self) -> FlowModule:
        """The module that trains."""
        assert isinstance(self._lightning_module, FlowModule)
        return self._lightning_module

    @property
    def runner(self) -> RoleRunner:
        """Runs the steps; its timeline tells what the lanes did when."""
        assert self._runner is not None, "the runner exists from setup to teardown"
        return self._runner

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Halves and optimizers must be in place first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that live on this rank, by name."""
        state = held_state(self.flow_module)
        return {name: value for name, value in state.items() if not _is_absent(value)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's optimizer state, by parameter name."""
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._named_optimizers[[id(known) for known in self.optimizers].index(id(own))].state()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint directory; every rank calls it.

        Raises:
            TypeError: there are ``storage_options``.
        """
        refuse_storage_options(storage_options)
        self._saved_at = time_of_save(self._saved_at)
        checkpoint["flowtrain"] = {"module": type(self.flow_module).__qualname__, "saved": self._saved_at}
        if self.allocation.activation_bytes is not None:
            checkpoint["flowtrain"]["activations"] = self.runner.activations.state_dict()
        with self.job.during("save a checkpoint"):
            self._finish_saving()
            module, buffers = self.flow_module, [name for name, _ in self.flow_module.named_buffers()]
            parts = (checkpoint, filepath, module.halves, self.allocation, self.job.groups, buffers)
            state = self.flow_module.trainer.state
            goes_on = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
            if self.background_saving and goes_on and not self.runner.stop_requested:
                self._saving = BackgroundSave(*parts)
            else:
                save_checkpoint(*parts)

    def _finish_saving(self) -> None:
        """Waits until the checkpoint that is being written has its name; every rank calls it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish(self.job.groups.cross)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint directory, this rank's halves only, or a plain Lightning checkpoint."""
        module = self.flow_module
        if weights_only is None and self._rank_launcher is not None:
            weights_only = self._rank_launcher.weights_only  # Lightning passes it on only where it loads before setup
        path = os.fspath(checkpoint_path)  # which may be a URL of a plain checkpoint
        checkpoint = load_checkpoint(
            path,
            module,
            self.allocation,
            self.job.groups,
            self.checkpoint_io,
            weights_only,
            resumes=module.trainer.training,
            shares={name: share for named in self._named_optimizers for name, share in named.shares.items()},
        )
        if module.trainer.training:
            self._saved_at = saved_time(checkpoint, Path(path))
            self.runner.activations.load_state(checkpoint.get("flowtrain", {}))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights that live on this rank."""
        load_half(self.flow_module, checkpoint["state_dict"], self.job.roles, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's part of the optimizers' state."""
        load_optimizers(self._named_optimizers, checkpoint["optimizer_states"])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint directory, but not before the one that takes its place is whole."""
        if not self.is_global_zero:
            return
        if self._saving is None:
            remove_checkpoint(filepath)
        else:
            self._saving.remove_afterwards(Path(filepath))


def _is_absent(value: Any) -> bool:
    """Whether a rank has nothing of a weight."""
    return value.part.numel() == 0 if isinstance(value, ElementRun) else isinstance(value, Tensor) and value.is_meta
