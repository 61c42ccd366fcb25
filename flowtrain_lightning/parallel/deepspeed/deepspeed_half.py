"""DeepSpeed's ZeRO-1 and ZeRO-2: whole weights on every rank, and a share each of gradients and optimizer states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flowtrain_lightning.parallel.deepspeed.deepspeed_engine import Stage, share_of, start_engine, summed_gradient
from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.parallel.fully_shard import RoleForward
from flowtrain_lightning.parallel.gradients import count_hooks
from flowtrain_lightning.parallel.offloading import ActivationsOnHost, SteppedOnHost
from flowtrain_lightning.parallel.regions import OptimizerShare


class DeepSpeedHalf:
    """A half of which every rank has a copy and optimizes a share; see `HalfEngine`.

    DeepSpeed cuts the weights of each parameter group, put one behind the other, into as many equal parts as there are
    ranks. The user's optimizer steps this rank's part in place of the weights, and then DeepSpeed sends every part to
    all ranks. Weights that no sample of a step has used count there as weights whose gradient is zero.

    Gradients are summed in one order on all ranks, whatever each of them used: by ZeRO-1 once a step, by ZeRO-2 after
    each backward, so that between backwards a rank holds those of its share only.

    Args:
        modules: path -> module, together the half; weights are float32.
        group: the ranks that hold the half; None is the default group.
        device: on which it computes.
        stage: of ZeRO.
        activations: where these lie between forward and backward, if not on the device.
        optimizer_on_host: the optimizer steps this rank's part in host memory, where its states lie too.

    Attributes:
        parameters: the weights, and once an optimizer was taken what it steps in their place.
        on_host: what of this rank's part lies in host memory, once an optimizer was taken.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """

    record = StepRecord()
    _own_hooks = 0  # that wait for each gradient to be added up

    def __init__(
        self,
        modules: dict[str, nn.Module],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        stage: Stage,
        activations: ActivationsOnHost | None = None,
        optimizer_on_host: bool = False,
    ) -> None:
        refuse_missing_deepspeed(stage)
        self._model = RoleForward(modules)
        self._group = group if group is not None else dist.group.WORLD
        self._device = device
        self._stage = stage
        self._activations = activations or nullcontext()
        self._optimizer_on_host = optimizer_on_host
        self.on_host: SteppedOnHost | None = None
        self._weights = list(self._model.parameters())
        self._wanted = [weight.requires_grad for weight in self._weights]
        self._trained = [weight for weight in self._weights if weight.requires_grad]
        self.parameters = list(self._weights)
        self.in_lockstep = stage > 1 and bool(self._trained)
        self._engine: Any = None
        self._step_hook: Any = None
        self._flats: list[Tensor] = []
        self._shares: dict[nn.Parameter, OptimizerShare] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._used = [False] * len(self._trained)  # by this rank in this step
        self._left_out: set[nn.Parameter] = set()  # want a gradient, but the optimizer does not have them
        self._has_told = False

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(weight.requires_grad for weight in self._weights)

    def take_optimizer(self, optimizer: Optimizer) -> Mapping[nn.Parameter, OptimizerShare]:
        """Puts this rank's share into the optimizer, in place of the weights.

        Args:
            optimizer: of the user; its groups may hold parameters of other halves, which stay.

        Returns:
            trained parameter -> which part of it the optimizer steps from now on.

        Raises:
            ValueError: the optimizer has no weight of the half, though some want a gradient; or a hook waits for a
                gradient to be added to others.
        """
        self.release()
        trained = set(self._trained)
        if not trained:
            return {}
        self._refuse_late_hooks()
        groups = [group for group in optimizer.param_groups if trained.intersection(group["params"])]
        of_groups = [[weight for weight in group["params"] if weight in trained] for group in groups]
        if not groups:
            raise ValueError(
                f"{len(trained)} weights of a half in DeepSpeed's layout want a gradient, but the optimizer has none "
                "of them. Give them to the optimizer of `configure_optimizers`, or set `requires_grad_(False)` where "
                "the half is built."
            )
        self._left_out = trained.difference(*of_groups)
        self._engine, flats = start_engine(self._model, of_groups, self._group, self._device, self._stage)
        self._flats = stepped = flats
        if self._optimizer_on_host:
            self.on_host = SteppedOnHost(flats, pinned=self._device.type != "cpu")
            stepped = self.on_host.tensors
        taken: dict[nn.Parameter, OptimizerShare] = {}
        for group, weights, flat, tensor in zip(groups, of_groups, flats, stepped, strict=True):
            group["params"] = [*(other for other in group["params"] if other not in trained), tensor]
            shares = {weight: self._share_of(weight, flat) for weight in weights}
            self._shares |= shares
            taken |= {weight: replace(share, flat=tensor) for weight, share in shares.items()}
        self.parameters = stepped  # type: ignore[assignment]
        self._step_hook = optimizer.register_step_post_hook(lambda *_: self._end_step())
        return taken

    def release(self) -> None:
        """Takes DeepSpeed's hooks off the weights. Afterwards another optimizer may be taken."""
        if self._step_hook is not None:
            self._step_hook.remove()
        if self._engine is not None:
            self._engine.destroy()
            self._engine, self._shares, self.parameters = None, {}, list(self._weights)
            self._flats, self.on_host = [], None

    def begin_step(self) -> None:
        """Forgets the gradients of the last step.

        Raises:
            ValueError: weights were frozen or unfrozen since DeepSpeed took them.
        """
        self._refuse_changed()
        self._sums.clear()
        self._used = [False] * len(self._trained)
        if self.on_host is not None:
            self.on_host.take_weights()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward."""
        with self._activations:
            return function(*args)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Inside, one backward runs; ZeRO-2 sums its gradients."""
        if not self.in_lockstep:
            yield
            return
        with self._engine.coalesce_grad_reduction():  # which sums at its end, and not in the order of the backward
            try:
                yield
            except BaseException:
                self._drop_gradients()  # other ranks will not come to sum them
                raise
            self._note_used()
            self._fill_in([weight for weight in self._trained if weight not in self._left_out])
        self._add_up()

    def send_gradients(self) -> None:
        """DeepSpeed sums in each backward, or in `finish_gradients`."""

    def finish_gradients(self, scale: float) -> None:
        """ZeRO-1 sums the gradients. Then those of this rank's share are scaled and given to the optimizer."""
        if not self._trained:
            return
        if self._stage == 1:
            self._note_used()
        by_any = self._used_by_any()
        for stepped in self.parameters:
            stepped.grad = None
        if not any(by_any):
            self._drop_gradients()
            return
        if self._stage == 1:
            self._fill_in([weight for weight, is_used in zip(self._trained, by_any, strict=True) if is_used])
            with self._engine.coalesce_grad_reduction():
                pass
            self._add_up()
        self._give([self._sums[flat].mul_(scale) for flat in self._flats])
        for weight, share in self._shares.items():
            if share.size:  # where `deepspeed.utils.safe_get_full_grad` looks
                gradient = summed_gradient(weight)
                gradient.copy_(share.of(self._sums[share.flat]).view_as(gradient))
        self._tell_unused(by_any)

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients of shares over all ranks of the role."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in gradients:
            squares += gradient.norm().double().square()
        dist.all_reduce(squares, group=self._group)
        return squares

    def _refuse_changed(self) -> None:
        if self._wanted != [weight.requires_grad for weight in self._weights]:
            raise ValueError(
                "`requires_grad` of a parameter was changed after DeepSpeed took its half, which optimizes the weights "
                "that wanted a gradient then. Set it where the half is built, and save a checkpoint and go on from it "
                "in a new run to change it; or take a layout of whole copies."
            )

    def _refuse_late_hooks(self) -> None:
        if any(count_hooks(weight)[1] > self._own_hooks for weight in self._trained):
            raise ValueError(
                "A hook was registered with `register_post_accumulate_grad_hook` on a weight of a half in DeepSpeed's "
                "layout, which takes gradients away as soon as they are summed. Use `register_hook`, which sees the "
                "gradient of each backward, or look at final gradients in `on_before_optimizer_step`."
            )

    def _share_of(self, weight: nn.Parameter, flat: Tensor) -> OptimizerShare:
        return share_of(weight, flat)

    def _give(self, gradients: Sequence[Tensor]) -> None:
        """Lets the optimizer have the final gradients of this rank's part."""
        if self.on_host is not None:
            gradients = self.on_host.take_gradients(gradients)
        for stepped, gradient in zip(self.parameters, gradients, strict=True):
            stepped.grad = gradient

    def _used_by_any(self) -> list[bool]:
        """Of each trained weight, whether any rank has used it in this step."""
        used = torch.tensor(self._used, dtype=torch.int32, device=self._device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        by_any: list[bool] = used.bool().tolist()
        return by_any

    def _note_used(self) -> None:
        for weight in self._left_out:
            if weight.grad is not None:
                self._refuse_left_out(weight)
        self._used = [used or weight.grad is not None for used, weight in zip(self._used, self._trained, strict=True)]

    def _refuse_left_out(self, weight: nn.Parameter) -> None:
        """Raises for a gradient that nobody would sum. A weight that the module never uses has none."""
        self._drop_gradients()  # else they are summed on the way out
        name = next(name for name, known in self._model.named_parameters() if known is weight)
        raise ValueError(
            f"The weight {name.removeprefix('/').replace('/', '.')!r} got a gradient, but the optimizer does not have "
            "it, and DeepSpeed sums gradients of the optimizer's weights only. Give it to the optimizer of "
            "`configure_optimizers`, or set `requires_grad_(False)` where the half is built."
        )

    def _fill_in(self, weights: list[nn.Parameter]) -> None:
        """Zeros where this rank has no gradient, so that all ranks sum the same weights in the same order."""
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _drop_gradients(self) -> None:
        for weight in self._trained:
            weight.grad = None

    def _add_up(self) -> None:
        """Adds what DeepSpeed has summed just now."""
        for weight, share in self._shares.items():
            sums = self._sums.get(share.flat)
            if sums is None:
                sums = self._sums[share.flat] = torch.zeros_like(share.flat)
            if share.size:
                share.of(sums).add_(summed_gradient(weight).reshape(-1))

    def _end_step(self) -> None:
        """After the optimizer's step: weights are what it has made of them, on all ranks."""
        if self.on_host is not None:
            self.on_host.return_weights()
        self._send_weights()

    def _send_weights(self) -> None:
        """Every rank gets what the others have stepped."""
        if self._engine is not None and self._sums:
            self._engine.step()
            self._sums.clear()

    def _tell_unused(self, by_any: list[bool]) -> None:
        used = [is_used for is_used, weight in zip(by_any, self._trained, strict=True) if weight not in self._left_out]
        if not all(used) and not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{len(used) - sum(used)} of {len(used)} weights took part in no sample of a step. DeepSpeed optimizes "
                "weights in one piece, so they are stepped as if their gradient were zero: momentum and weight decay "
                "act on them, which they do not in other layouts.",
                stacklevel=2,
            )


def refuse_missing_deepspeed(stage: Stage) -> None:
    """Raises where DeepSpeed is not installed.

    Raises:
        ModuleNotFoundError: says what to do.
    """
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            f"A role has shard 'deepspeed-{stage}', but DeepSpeed is not installed: pip install "
            "'flowtrain-lightning[deepspeed]'. Or give it shard 'fsdp', which PyTorch brings."
        )
