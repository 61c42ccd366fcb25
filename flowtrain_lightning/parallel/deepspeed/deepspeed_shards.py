"""DeepSpeed's ZeRO-3: a share of every weight on each rank, gathered for the module that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flowtrain_lightning.parallel.deepspeed.deepspeed_engine import (
    deepspeed_environment,
    flat_gradients,
    forget_hooks,
    linear_without_weights,
    start_engine,
)
from flowtrain_lightning.parallel.deepspeed.deepspeed_half import DeepSpeedHalf, refuse_missing_deepspeed
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import held_run, partition_weight
from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from flowtrain_lightning.parallel.regions import OptimizerShare


class DeepSpeedShardedHalf(DeepSpeedHalf):
    """A half whose weights, gradients and optimizer states are shared by DeepSpeed; see `HalfEngine`.

    A rank keeps a run of every weight's elements. Weights are gathered when their module computes, forward and
    backward, and those that a method of the user's takes by itself for the whole of that method. Gradients are summed
    in every backward, and each rank keeps its runs of them.

    The user's optimizer steps this rank's runs where they lie, all of a parameter group in one flat tensor, so nothing
    is sent after a step.

    Only one forward may wait for its backward: DeepSpeed counts gathered weights module by module, and with two it
    computes wrong gradients. Every rank must use the same weights in a forward.

    Args:
        modules: see `DeepSpeedHalf`; weights may have no memory yet.
        group: see there.
        device: see there.
        fill: gives weights that have none their numbers, and calls its argument with each that has got them.
        activations: see there.
        optimizer_on_host: see there.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """

    _own_hooks = 1

    def __init__(
        self,
        modules: dict[str, nn.Module],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        fill: Callable[[Callable[[nn.Parameter], None]], None],
        activations: ActivationsOnHost | None = None,
        optimizer_on_host: bool = False,
    ) -> None:
        refuse_missing_deepspeed(3)
        cut = partial(partition_weight, ranks=group, device=device)
        fill(cut)
        for weight in [weight for module in modules.values() for weight in module.parameters()]:
            cut(weight)
        super().__init__(modules, group, device, stage=3, activations=activations, optimizer_on_host=optimizer_on_host)
        self.in_lockstep = True
        self._ranks = dist.get_world_size(self._group)
        for number, weight in enumerate(self._trained):
            weight.register_post_accumulate_grad_hook(partial(self._note_gradient, number))  # type: ignore[no-untyped-call]
        self._waiting = False

    def take_optimizer(self, optimizer: Optimizer) -> Mapping[nn.Parameter, OptimizerShare]:
        """As of `DeepSpeedHalf`."""
        shares = super().take_optimizer(optimizer)
        if self._engine is not None:
            self._gradients = flat_gradients(self._engine, self._flats)
        return shares

    def release(self) -> None:
        """Takes DeepSpeed's hooks off the modules. They come back with the next forward, or optimizer."""
        engine = self._engine
        super().release()
        if engine is not None:
            forget_hooks(engine)

    def begin_step(self) -> None:
        """Forgets the gradients of the last step.

        Raises:
            ValueError: weights were frozen or unfrozen since DeepSpeed took them.
        """
        self._refuse_changed()
        self._used = [False] * len(self._trained)
        if self._shares:
            self._engine.optimizer.zero_grad()
            for stepped, gradient in zip(self.parameters, self._gradients, strict=True):
                stepped.grad = None
                gradient.zero_()  # else what no sample uses at first would be added to what it was
        if self.on_host is not None:
            self.on_host.take_weights()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward.

        Raises:
            RuntimeError: another one still waits for its backward.
        """
        if self._waiting:
            raise RuntimeError(
                "A forward of a half in ZeRO-3 began while another one waits for its backward, with which DeepSpeed "
                "computes wrong gradients."
            )
        if self._engine is None:
            self._engine, _ = start_engine(self._model, [], self._group, self._device, 3)
        with self._activations, self._as_deepspeed_needs():
            if torch.is_grad_enabled():
                result = self._engine(function=partial(function, *args))
                self._waiting = bool(self._shares)
                return result
            with torch.inference_mode(False), torch.no_grad():  # which weights would be marked by
                results: list[Any] = []  # whatever they are, DeepSpeed need not look for weights in them
                self._engine(function=lambda: results.append(function(*args)))
                return results[0]

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Inside, one backward runs; it sums its gradients."""
        with self._as_deepspeed_needs():
            yield
        self._waiting = False

    def finish_gradients(self, scale: float) -> None:
        """Scales the gradients of this rank's share, and gives them to the optimizer."""
        if not self._trained:
            return
        used = self._used_by_any()
        if any(used):
            self._give([gradient.mul_(scale * self._ranks) for gradient in self._gradients])  # DeepSpeed gives means
            self._tell_unused(used)

    def _share_of(self, weight: nn.Parameter, flat: Tensor) -> OptimizerShare:
        run = held_run(weight)
        return OptimizerShare(flat, run.shape, _offset(run.part, flat), run.start, run.part.numel())

    def _send_weights(self) -> None:
        """Nothing: weights are gathered when they are used."""

    def _note_gradient(self, number: int, _: Tensor) -> None:
        if self._left_out and self._trained[number] in self._left_out:
            self._refuse_left_out(self._trained[number])
        self._used[number] = True

    @contextmanager
    def _as_deepspeed_needs(self) -> Iterator[None]:
        with deepspeed_environment(self._device), linear_without_weights():
            yield


def _offset(part: Tensor, flat: Tensor) -> int:
    """Returns the place in a flat tensor at which a part of it begins."""
    return int(part.storage_offset()) - int(flat.storage_offset()) if part.numel() else 0
