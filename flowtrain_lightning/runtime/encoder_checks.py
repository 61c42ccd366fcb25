"""Notices faults of an encoder that no error tells of: weights that change, or are not its own, unused features."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flowtrain_lightning.compute.zeros_beside import leaves_behind
from flowtrain_lightning.parallel import local_part
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import held_run, is_partitioned
from flowtrain_lightning.parallel.halves import HalvedModule, role_of
from flowtrain_lightning.parallel.role_buffers import KeptBuffers, RoleBuffers

_STEPS = 10
"""Some models begin with gates that are closed, and pass no gradient in their first steps."""

_Seen = dict[str, tuple[Tensor, int, int]]
"""Name -> the parameter, the address of its values, and how often they were changed in place."""


class FrozenEncoder:
    """Sees when a frozen encoder's weights are changed: work ahead would then have been done with the old ones.

    A rank that does not hold the weights sees changes too where a hook makes them on all ranks, so it does not take
    features of the old weights before it is told. What is written through ``parameter.data`` is not seen by anyone.

    Args:
        module: holds the weights, or their names.
        buffers: role -> those that its forwards may read, of the roles of this rank.
    """

    def __init__(self, module: HalvedModule, buffers: Mapping[str, RoleBuffers]) -> None:
        self._module = module
        self._buffers = buffers
        self._seen: dict[str, _Seen] = {}
        self._roles: dict[str, Collection[str]] = {}
        self._kept: dict[tuple[str, str], KeptBuffers] = {}  # stage and role -> its buffers

    def note(self, stage: str, roles: Collection[str]) -> None:
        """With the weights that they have now these encoders may work ahead into the stage's next steps."""
        self._seen[stage] = self._look(roles)
        self._roles[stage] = roles
        for role, buffers in self._of(stage):
            self._kept[stage, role] = buffers.keep(self._kept.get((stage, role), {}))

    def refuse_changes(self, stage: str) -> None:
        """Raises where they are others by now, or buffers are; before ranks of a role share these.

        Raises:
            ValueError: names one of them, and what to do.
        """
        now, then = self._look(self._roles[stage]), self._seen[stage]
        changed = [name for name in {**then, **now} if not _is_same(now.get(name), then.get(name))]
        written = [
            name
            for role, buffers in self._of(stage)
            if buffers.may_work_ahead
            for name in buffers.changed(self._kept[stage, role])
        ]
        if changed or written:
            what, names = ("Weights", changed) if changed else ("Buffers", written)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"{what} of the encoder were changed between two steps: {names[0]!r}{more}. It is frozen, so "
                f"features of later steps may have been made already, with the {what.lower()} before. Change them in "
                "`on_train_epoch_start`, or set FlowTrainStrategy(placement='colocated'), with which nothing is worked "
                "ahead. To let the encoder train from a step on, `requires_grad_(True)` alone is enough."
            )

    def _of(self, stage: str) -> list[tuple[str, RoleBuffers]]:
        return [(role, buffers) for role, buffers in self._buffers.items() if role in self._roles[stage]]

    def _look(self, roles: Collection[str]) -> _Seen:
        weights = {
            f"{path}.{name}": weight
            for role, paths in self._module.halves.items()
            if role in roles
            for path in paths
            for name, weight in self._module.get_submodule(path).named_parameters()
        }
        held = {name: _held(weight) for name, weight in weights.items()}
        return {name: (weight, held[name].data_ptr(), held[name]._version) for name, weight in weights.items()}


class UnusedFeatures:
    """Notices that an encoder trains and yet gets no gradient: looks until it has seen one that is not zero."""

    def __init__(self) -> None:
        self._steps = 0
        self._done = False

    def look(self, parameters: Sequence[nn.Parameter]) -> None:
        """After a step in which the encoder trained.

        Args:
            parameters: of the encoder, with the step's gradients.
        """
        if self._done:
            return
        self._steps += 1
        if any(bool(local_part(p.grad).any()) for p in parameters if p.grad is not None):
            self._done = True
        elif self._steps == _STEPS:
            self._done = True
            warnings.warn(
                f"The encoder trains, but in {_STEPS} steps with media none of its weights got a gradient that is not "
                "zero. Does `merge` use the features, and does `encode` return them without `detach` or `no_grad`? If "
                "the encoder is to stay as it is, freeze it (`self.encoder.requires_grad_(False)`): it then works "
                "ahead of the backbone.",
                stacklevel=2,
            )


@contextmanager
def graphs_alone() -> Iterator[None]:
    """Inside, forwards make graphs that tell what they follow from, and keep nothing with which to go backward."""
    with torch.inference_mode(mode=False), torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing):
        yield


def told_of_other_weights(module: HalvedModule, role: str, features: Iterable[Tensor]) -> str:
    """Says that features follow from weights of another half that train; empty where they do not.

    Where each half has ranks of its own those have no values. On a rank with both the forward runs, but the gradient is
    not that of one process: nothing goes back through a frozen encoder, and ranks sum the other half's gradients apart.

    Args:
        module: made them.
        role: that encodes.
        features: with their graph, though the role may not train.
    """
    owner_of = {id(weight): (name, role_of(name, module.halves)) for name, weight in module.named_parameters()}
    for leaf in leaves_behind(features, set()):
        name, owner = owner_of.get(id(leaf), ("", None))
        if owner not in (role, None):
            return (
                f"{type(module).__name__}.encode computes with {name!r}, which trains and lies on the {owner}. Where "
                f"each half has ranks of its own, those of the {role} do not have it, and here, where ranks have both, "
                "its gradient would not be that of one process. Use it in `merge` or `loss`, or let `halves` name its "
                f"module for the {role}."
            )
    return ""


def refuse_written_by_one_role(role: str, buffers: Sequence[str]) -> None:
    """Raises where one role alone writes buffers that lie on no half: other ranks keep, and save, what they were.

    Args:
        role: whose forwards write.
        buffers: that lie on no half.

    Raises:
        ValueError: names one, and what to do.
    """
    if buffers:
        raise ValueError(
            f"Forwards of the {role} write the buffer {buffers[0]!r}, which lies on no half, so ranks without the "
            f"{role} do not see that, and checkpoints hold their value. Register it on a module of the {role}."
        )


def refuse_unsaved(module: HalvedModule) -> None:
    """Raises where weights were added since the halves were built, on rank 0, of which it has no values to save.

    Args:
        module: about to train its first step.

    Raises:
        ValueError: names one, and what to do.
    """
    for name, weight in module.named_parameters():
        if weight.is_meta and role_of(name, module.halves) is None:
            raise ValueError(
                f"The parameter {name!r} was added after the halves were built, and lies on none of them. Rank 0, "
                "which saves such parameters, has no values of it, so checkpoints would lack it. Build it where its "
                "half is built, as in `configure_encoder`, under a module that `halves` names."
            )


def _nothing(_: Any) -> Any:
    return None


def _held(weight: nn.Parameter) -> Tensor:
    """Returns this rank's part of a weight."""
    return held_run(weight).part if is_partitioned(weight) else local_part(weight)


def _is_same(one: tuple[Tensor, int, int] | None, other: tuple[Tensor, int, int] | None) -> bool:
    return one is not None and other is not None and one[0] is other[0] and one[1:] == other[1:]
