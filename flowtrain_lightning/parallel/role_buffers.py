"""Buffers of a half: every step begins with those of the role's first rank on all of its ranks, as under DDP.

A forward may write buffers, such as running statistics, counters or averages, and each rank of a role sees other
samples. So one rank's buffers count: those of the first. They are what a checkpoint holds. Buffers that are not in a
module's state dict (``persistent=False``), such as caches, belong to each rank. A forward that runs again for its
backward writes none a second time, one of padding none at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowtrain_lightning.parallel.experts.expert_counts import balance_experts
from flowtrain_lightning.parallel.gradients import local_part
from flowtrain_lightning.parallel.halves import HalvedModule, role_of

_LOOKS = 3
"""Steps in which a half's forwards are asked whether they write buffers."""


KeptBuffers = Mapping[str, tuple[Tensor, int, Tensor]]
"""Name -> a buffer, how often it was changed in place, and its values then."""


class RoleBuffers:
    """The buffers of one role that a checkpoint holds, as this rank has them.

    Args:
        module: its halves are in their layouts.
        role: whose half it is; buffers that lie on no half are shared by the ranks of every role.
        group: of the role; None is the default group.
        device: on which the group communicates.
    """

    def __init__(self, module: HalvedModule, role: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
        assert isinstance(module, nn.Module)
        self._group = group
        self._device = device
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self._parts = [part for path in module.halves[role] for part in module.get_submodule(path).modules()]
        self._owners = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in persistent_buffers(module)
            if role_of(name, module.halves) in (role, None) and not module.get_buffer(name).is_meta
        }
        self._kinds = {name: _kind(buffer) for name, buffer in self._held()}
        self._before: dict[str, Tensor] = {}  # the forwards of now
        self._looks_left = _LOOKS if self._owners else 0
        self._written = False

    def share(self) -> None:
        """Gives every rank of the role the buffers of the first one. All of them call it, between steps.

        Raises:
            ValueError: a buffer has another shape or type than before, so that ranks may differ.
        """
        if self._alone or not self._owners:
            return
        by_type: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, buffer in self._held():
            if _kind(buffer) != self._kinds[name]:
                raise ValueError(
                    f"The buffer {name!r} was {self._kinds[name]} when training began and is {_kind(buffer)} now. "
                    "Ranks of a role take the buffers of its first rank, and a checkpoint holds these, so they keep "
                    "shape and type. Register it with persistent=False if each rank may have its own, such as a cache."
                )
            # As data, since whoever looks whether somebody has changed a buffer does not mean this.
            by_type[buffer.dtype].append(local_part(buffer.detach()).data)
        for parts in by_type.values():
            flat = torch.cat([part.reshape(-1) for part in parts]).to(self._device)
            dist.broadcast(flat, group_src=0, group=self._group)
            for part, values in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                part.copy_(values.view_as(part))

    def balance_experts(self) -> None:
        """At the end of a step that trained: biases of experts follow it. All ranks of the role call it."""
        balance_experts(self._parts, self._sum)

    def _sum(self, counts: Tensor) -> None:
        if not self._alone:
            summed = counts.to(self._device)
            dist.all_reduce(summed, group=self._group)
            counts.copy_(summed)

    def note(self) -> None:
        """Before the forwards of a training step, which are looked at in the first steps."""
        if self._looks_left > 0 and not self._written:
            self._before = {name: buffer.detach().clone() for name, buffer in self._held()}

    def look(self) -> list[str]:
        """After these forwards: the buffers that they have written, told once."""
        if self._looks_left == 0 or self._written:
            return []
        self._looks_left -= 1
        before, self._before = self._before, {}
        held = self._held()
        written = [name for name, now in held if _kind(now) != self._kinds[name] or not now.equal(before[name])]
        self._written = bool(written)
        return written

    def found(self) -> dict[str, Tensor]:
        """Copies of the buffers before a forward that will run again; none where no forward writes any."""
        writes = self._written or self._looks_left > 0
        return {name: buffer.detach().clone() for name, buffer in self._held()} if writes else {}

    @contextmanager
    def again(self, found: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, a forward runs again: it finds what it found at first, and what it writes is lost.

        Values that autograd holds of the buffers themselves stay as they are.
        """
        now = {name: buffer for name, buffer in self._held() if name in found}
        self._put(found)
        try:
            yield
        finally:
            self._put(now)

    def keep(self, former: KeptBuffers) -> KeptBuffers:
        """What they are now, for `changed`. What is as in a former one is not copied again."""
        return {
            name: known
            if (known := former.get(name)) is not None and _is_untouched(buffer, known)
            else (buffer, _version_of(buffer), local_part(buffer.detach()).clone())
            for name, buffer in self._held()
        }

    def changed(self, since: KeptBuffers) -> list[str]:
        """Names of those that are others since; no device is waited for where none was written."""
        touched = [(name, buffer) for name, buffer in self._held() if not _is_untouched(buffer, since[name])]
        return [name for name, buffer in touched if not torch.equal(local_part(buffer.detach()), since[name][2])]

    @property
    def may_work_ahead(self) -> bool:
        """Whether forwards may run before their step: what they write would depend on how early that is."""
        return not self._owners or (self._looks_left < _LOOKS and not self._written)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, (owner, own_name) in self._owners.items():
            yield name, owner.get_buffer(own_name)

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            owner, own_name = self._owners[name]
            setattr(owner, own_name, buffer)


def persistent_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that the module's state dict holds, in its order."""
    buffers = {name for name, _ in module.named_buffers()}
    return [name for name in module.state_dict() if name in buffers]


def _is_untouched(buffer: Tensor, kept: tuple[Tensor, int, Tensor]) -> bool:
    return kept[0] is buffer and 0 <= kept[1] == _version_of(buffer)


def _version_of(buffer: Tensor) -> int:
    """How often it was changed in place; -1 where nobody counts that."""
    return -1 if buffer.is_inference() else buffer._version


def _kind(buffer: Tensor) -> str:
    return f"{list(buffer.shape)} {buffer.dtype}"
