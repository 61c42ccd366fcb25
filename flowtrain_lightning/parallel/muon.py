"""Muon for the matrices of repeated layers and AdamW for all else, in one optimizer that also steps shards exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from flowtrain_lightning.parallel.blocks import repeated_blocks
from flowtrain_lightning.parallel.gradients import local_gradient, local_part
from flowtrain_lightning.parallel.regions import local_region, whole

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
"""Of Newton-Schulz, as in ``torch.optim.Muon``."""

_SCALE = 0.2
"""Root mean square of an update of AdamW, which those of matrices are scaled to: both take one learning rate."""


class MuonAdamW(Optimizer):
    """Steps the matrices of repeated layers by Muon, everything else (embeddings, heads, projectors, norms) by AdamW.

    ``return flow.MuonAdamW(self, lr=1e-4)`` is all of a ``configure_optimizers``. Learning rate and weight decay are
    those of AdamW; vectors do not decay. A matrix that ranks share (FSDP2, tensor ranks) is stepped as if it were
    whole: its update is gathered for the moment. Updates are made orthogonal in bfloat16, as by ``torch.optim.Muon``,
    and of float64 weights in float64. The experts of a layer are a matrix each.

    Args:
        module: what trains, as it is built; parameters without ``requires_grad`` are left out.
        lr: learning rate.
        weight_decay: of matrices and tables, relative to ``lr``.
        momentum: of Muon.
        betas: of AdamW.
        eps: of AdamW.

    Raises:
        ValueError: the module has no repeated layers with matrices that train.
    """

    def __init__(
        self,
        module: nn.Module,
        lr: float = 1e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        known = {id(weight) for weight in matrices_of_layers(module)}
        training = [weight for weight in module.parameters() if weight.requires_grad]
        matrices = [weight for weight in training if id(weight) in known]
        if not matrices:
            raise ValueError(
                f"{type(module).__name__} has no repeated layers (a ModuleList of modules of one class) with matrices "
                "that train, which Muon is for. Build its halves before configure_optimizers, or take AdamW."
            )
        others = [weight for weight in training if id(weight) not in known]
        tables = [weight for weight in others if weight.ndim > 1]
        vectors = [weight for weight in others if weight.ndim <= 1]
        groups = [
            {"params": matrices, "orthogonal": True},
            {"params": tables, "orthogonal": False},
            {"params": vectors, "orthogonal": False, "weight_decay": 0.0},
        ]
        super().__init__(
            groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Ranks that share weights all take it, since updates are gathered.

        Args:
            closure: computes the loss, and gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["orthogonal"]:
                self._step_matrices(group)
            else:
                self._step_others(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            gradient = local_gradient(weight)
            if gradient is None:
                continue
            if not (state := self.state[weight]):
                state["momentum_buffer"] = torch.zeros_like(weight)
            buffer = local_part(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(_gathered(gradient.lerp(buffer, group["momentum"]), weight))
            own = update[local_region(weight).within(whole(weight.shape))]
            stepped = local_part(weight)
            stepped.mul_(1 - group["lr"] * group["weight_decay"])
            scale = _SCALE * max(weight.shape[-2:]) ** 0.5
            stepped.add_(own.to(stepped), alpha=-group["lr"] * scale)

    def _step_others(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            if not (state := self.state[weight]):
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        first, second, steps = (
            [self.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [weight.grad for weight in weights],
            first,
            second,
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def matrices_of_layers(module: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers, and of experts, inside of the repeated layers of a module.

    Args:
        module: is built.
    """
    parts = [part for block in repeated_blocks(module) for part in block.modules()]
    return [
        weight
        for part in parts
        for weight in part.parameters(recurse=False)
        if (weight.ndim == 2 and isinstance(part, nn.Linear)) or (weight.ndim == 3 and not isinstance(part, nn.Conv1d))
    ]


def orthogonal(update: Tensor) -> Tensor:
    """A matrix, or several, with the same singular vectors and singular values near 1.

    Args:
        update: ``[..., rows, columns]``.

    Returns:
        the same shape, in bfloat16; in float64 where ``update`` is.
    """
    a, b, c = _COEFFICIENTS
    found = update if update.dtype == torch.float64 else update.bfloat16()
    is_tall = update.shape[-2] > update.shape[-1]
    found = found.mT if is_tall else found
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        found = a * found + (b * gram + c * (gram @ gram)) @ found
    orthogonal: Tensor = found.mT if is_tall else found
    return orthogonal


def _gathered(update: Tensor, weight: Tensor) -> Tensor:
    """The whole update of a weight of which this rank holds a part."""
    if not isinstance(weight, DTensor):
        return update
    mesh = weight.device_mesh
    part = update.to(mesh.device_type)  # where weights lie in host memory
    shared = DTensor.from_local(
        part, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return shared.full_tensor()
