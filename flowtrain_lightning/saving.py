"""What the strategy saves and loads on one rank: the halves that live there, and their optimizers' state by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from flowtrain_lightning.across_roles import AcrossRoles
from flowtrain_lightning.checkpoint import load_checkpoint, remove_checkpoint, save_checkpoint
from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.halves import role_of
from flowtrain_lightning.trainer.launcher import RankLauncher


class SavingHalves(AcrossRoles):
    """A strategy whose checkpoints are directories, to which every rank writes its own part."""

    _named_optimizers: Sequence[NamedOptimizer] = ()

    @property
    def flow_module(self) -> FlowModule:
        """The module that trains."""
        assert isinstance(self._lightning_module, FlowModule)
        return self._lightning_module

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Halves and optimizers must be in place first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that live on this rank, by name."""
        return {name: value for name, value in self.flow_module.state_dict().items() if not _is_absent(value)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's optimizer state, by parameter name."""
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._named_optimizers[[id(known) for known in self.optimizers].index(id(own))].state()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint directory; every rank calls it.

        Raises:
            TypeError: there are ``storage_options``.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} was given, but flowtrain writes checkpoint directories itself, "
                "with no plugin that takes options. Leave them out."
            )
        with self.job.during("save a checkpoint"):
            save_checkpoint(checkpoint, filepath, self.flow_module.halves, self.allocation, self.job.groups)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint directory, this rank's halves only, or a plain Lightning checkpoint."""
        module = self.flow_module
        if weights_only is None and isinstance(self.launcher, RankLauncher):
            weights_only = self.launcher.weights_only  # Lightning passes it on only where it loads before the setup
        return load_checkpoint(
            checkpoint_path,
            module.halves,
            self.allocation,
            self.job.groups,
            self.checkpoint_io,
            weights_only,
            resumes=module.trainer.training,
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights that live on this rank."""
        saved: Mapping[str, Tensor] = checkpoint["state_dict"]
        known = self.flow_module.state_dict().keys()
        own = {name for name in known if role_of(name, self.flow_module.halves) in (None, *self.job.roles)}
        missing, unknown = sorted(own - saved.keys()), sorted(saved.keys() - known)
        if strict and (missing or unknown):
            raise RuntimeError(
                f"The checkpoint does not fit {type(self.flow_module).__name__}: missing {missing or 'nothing'}, "
                f"unknown {unknown or 'nothing'}. Build the module as it was saved, or set strict_loading=False."
            )
        self.flow_module.load_state_dict({name: saved[name] for name in own & saved.keys()}, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's part of the optimizers' state."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self._named_optimizers):
            raise ValueError(
                f"The checkpoint holds the state of {len(states)} optimizers, but configure_optimizers returns "
                f"{len(self._named_optimizers)}. Use the same configure_optimizers as when it was saved."
            )
        for named, saved in zip(self._named_optimizers, states, strict=True):
            named.load(saved)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint directory."""
        if self.is_global_zero:
            remove_checkpoint(filepath)


def _is_absent(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
