"""Averages of the weights over the steps of a run, on every layout: each rank averages what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn, get_swa_avg_fn

from flowtrain_lightning.checkpoint.local_shard import LocalShard
from flowtrain_lightning.parallel.gradients import local_part

_CURRENT = "current_model_state"
_STATE = "averaging_state"


class AverageWeights(L.Callback):
    """Keeps averages of the weights that train, validates with them, and leaves them in the module when it ends.

    What Lightning's ``EMAWeightAveraging`` computes, to the bit, also where ranks hold only a half of the module or
    shards of it. Checkpoints hold the averages as their weights, for ``load_from_checkpoint`` and ``flowtrain export``,
    and beside them what training goes on from; Lightning's own callback goes on from them too.

    Until the first average is taken, all is as without this callback. Buffers of floating-point numbers that
    checkpoints hold are averaged as well. The average of a frozen weight is itself, and counts where it trains later.

    Args:
        decay: after a step an average is ``decay`` times what it was and ``1 - decay`` times the weight; None gives all
            steps the same weight.
        update_every_n_steps: averages are taken after every n-th step.
        update_starting_at_step: the first step after which averages are taken, counted from 0.

    Raises:
        ValueError: ``update_every_n_steps`` below 1.
    """

    def __init__(
        self, decay: float | None = 0.999, update_every_n_steps: int = 1, update_starting_at_step: int = 0
    ) -> None:
        if update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps is {update_every_n_steps}; give 1 or more.")
        rule: Any = get_swa_avg_fn if decay is None else get_ema_avg_fn  # both are untyped
        self._averaged = rule() if decay is None else rule(decay)
        self._every = update_every_n_steps
        self._first = update_starting_at_step
        self._latest_step = 0
        self._updates = 0
        self._held: dict[str, Tensor] = {}  # the averages, or the weights while these are in the module
        self._frozen: list[tuple[str, Tensor]] = []  # weights without averages, when averages were taken last
        self._swapped = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets the averages of an earlier run."""
        if stage == TrainerFn.FITTING:
            self._held, self._updates, self._latest_step, self._swapped = {}, 0, 0, False
            self._frozen = []

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keeps what a weight was while it was frozen, before its first step."""
        thawed = [(name, weight) for name, weight in self._frozen if weight.requires_grad]
        if thawed:
            self._held |= {name: weight.detach().clone() for name, weight in thawed}
            self._frozen = [(name, weight) for name, weight in self._frozen if not weight.requires_grad]

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the averages."""
        step = trainer.global_step - 1
        if trainer.global_step <= self._latest_step or step < self._first or step % self._every:
            return
        self._frozen = []
        for name, weight in _first_tensors(pl_module):
            if name in self._held:
                average = local_part(self._held[name])
                average.copy_(self._averaged(average, local_part(weight), self._updates))
            elif _changes(weight):
                self._held[name] = weight.detach().clone()
            else:
                self._frozen.append((name, weight))
        self._updates += 1
        self._latest_step = trainer.global_step

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Puts the averages into the module."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Puts the weights back, when all callbacks have seen the averages at the epoch's end."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the averages in the module."""
        self._swap(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"latest_update_step": self._latest_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self._latest_step = state_dict["latest_update_step"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Gives the checkpoint both, under the names that Lightning's callback has for them."""
        if not self._held:
            return
        within = checkpoint["state_dict"]
        beside = {name: self._held.get(first, within[name]) for name, first in _first_names(pl_module, within).items()}
        checkpoint["state_dict"], checkpoint[_CURRENT] = (within, beside) if self._swapped else (beside, within)
        checkpoint[_STATE] = {"n_averaged": torch.tensor(self._updates)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the averages, which the module has just got, and gives it the weights."""
        if trainer.state.fn != TrainerFn.FITTING or _CURRENT not in checkpoint:
            return
        averages, weights = checkpoint["state_dict"], checkpoint[_CURRENT]
        self._held, self._frozen = {}, []
        for name, average in _first_tensors(pl_module):
            if _changes(average) or not _same(averages.get(name), weights.get(name)):  # it has been trained
                self._held[name] = average.detach().clone()
            else:
                self._frozen.append((name, average))
        self._updates = int(checkpoint[_STATE]["n_averaged"])
        trainer.strategy.load_model_state_dict({"state_dict": weights}, strict=pl_module.strict_loading)

    @torch.no_grad()
    def _swap(self, module: L.LightningModule) -> None:
        for name, weight in _first_tensors(module):
            if name in self._held:
                held, within = local_part(self._held[name]), local_part(weight.detach())
                former = within.clone()
                within.copy_(held)
                held.copy_(former)
        self._swapped = bool(self._held) and not self._swapped


def _first_tensors(module: L.LightningModule) -> Iterator[tuple[str, Tensor]]:
    """First name and value of all that may be averaged of what this rank holds."""
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.is_meta or not value.is_floating_point() or id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value


def _changes(value: Tensor) -> bool:
    """Whether it is a weight that trains, or a buffer."""
    return value.requires_grad or not isinstance(value, nn.Parameter)


def _same(one: Tensor | LocalShard | None, other: Tensor | LocalShard | None) -> bool:
    """Whether two values from a checkpoint are equal, as far as this rank has read them."""
    parts = [each.part if isinstance(each, LocalShard) else each for each in (one, other)]
    return parts[0] is not None and parts[1] is not None and torch.equal(parts[0], parts[1])


def _first_names(module: L.LightningModule, state: Mapping[str, Any]) -> dict[str, str]:
    """Each name in a state -> the first name of the same tensor: tied weights have several."""
    first: dict[int, str] = {}
    same = {
        name: first.setdefault(id(weight), name) for name, weight in module.named_parameters(remove_duplicate=False)
    }
    return {name: same.get(name, name) for name in state}
