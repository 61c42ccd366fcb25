"""Counts the bytes that a token or patch keeps for its backward, where a step computes everything again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flowtrain_lightning.data import StepPlan
from flowtrain_lightning.data.loading.dataloader import StepLoader
from flowtrain_lightning.packing.stage_entries import part_names, stage_name
from flowtrain_lightning.parallel.offloading import is_of_weights
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.program import StepProgram
from flowtrain_lightning.runtime.step import Step

_SPARE = 1.05
"""Of what was counted, for batches that have more rows of features, or more samples, for each token."""


class ActivationCount:
    """What one rank counts of its batches, where the allocation limits activations; elsewhere it does nothing.

    Nothing is kept of a batch of which it is not known what it keeps. So the first step that trains computes everything
    again, one batch at a time, and counts. From the next one on it is known, alike on all ranks.

    Args:
        job: the calling rank's.

    Attributes:
        row_bytes: role, or stage of one -> bytes of a token, or patch.
    """

    def __init__(self, job: Job) -> None:
        self.row_bytes: Mapping[str, float] = MappingProxyType({})
        self._job = job
        self._trunk = job.allocation.trunk
        self._limit = job.allocation.activation_bytes
        self._found: dict[str, float] = {}
        self._trained: frozenset[str] = frozenset()

    def outdate(self, program: StepProgram, training: Collection[str]) -> bool:
        """Whether a program of a step that trains these roles was made when less, or something else, was known."""
        if self._limit is None:
            return False
        trained = frozenset({*training, self._trunk})
        if trained != self._trained:  # what others kept says nothing of these
            self._trained, self.row_bytes, self._found = trained, MappingProxyType({}), {}
        return program.row_bytes != self.row_bytes

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, in JSON types: a run that goes on keeps what it would have kept."""
        return {"trained": sorted(self._trained), "row_bytes": dict(self.row_bytes)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Takes what a checkpoint of the same allocation holds.

        Args:
            saved: what the checkpoint says of its run, its allocation among it.
        """
        own = self._job.allocation.state_dict()
        if "activations" in saved and all(saved.get(name) == value for name, value in own.items()):
            self._trained = frozenset(saved["activations"]["trained"])
            self.row_bytes = MappingProxyType(dict(saved["activations"]["row_bytes"]))

    @contextmanager
    def again(self, role: str, rows: int) -> Iterator[None]:
        """Inside, a forward runs again: what it keeps of so many tokens or patches is counted."""
        if self._limit is None:
            yield
            return
        stages = self._job.stages
        part = stage_name(role, stages[role][0]) if role in stages else role
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if not is_of_weights(tensor):
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        if part in self.row_bytes or not rows:
            yield
            return
        with saved_tensors_hooks(note, _same):
            yield
        if kept:  # of frozen layers nothing is, without media: that says nothing of batches that have some
            found = float(math.ceil(sum(kept.values()) / rows * _SPARE))
            self._found[part] = max(self._found.get(part, 0.0), found)

    def agree(self, step: Step, loader: Any) -> None:
        """After a step that trained: ranks tell each other what they counted, if there was anything to count.

        Args:
            step: the step.
            loader: that steps come from.

        Raises:
            ValueError: one batch alone may keep more than a rank may.
        """
        if self._limit is None:
            return
        members = step.batch.shard.members
        longest = {role: _longest(step.plan, role) for role in step.plan.batches if role in self._trained}
        parts = {
            part: role for role in longest for part in part_names(role, members.pipeline_of(role)) if longest[role]
        }
        if self.row_bytes.keys() >= parts.keys():
            return
        found = dict(self.row_bytes)
        for of_rank in self._job.groups.cross.gather_messages(self._found):
            for part, count in of_rank.items():
                found[part] = max(found.get(part, 0.0), count)
        if found.keys() == self.row_bytes.keys():  # as of frozen layers, of which nothing was kept
            return
        packing = loader.steps.packing if isinstance(loader, StepLoader) else None
        for part, role in ((part, role) for part, role in parts.items() if part in found):
            setting = "token_budget" if role == self._trunk else "encoder_budget"
            rows = max(longest[role], getattr(packing, setting, 0))
            if found[part] * rows > self._limit:
                raise ValueError(
                    f"The {part} keeps {found[part]:,.0f} bytes of a token or patch for its backward, so "
                    f"{found[part] * rows:,.0f} of a batch of {rows:,}, but activation_bytes is {self._limit:,.0f}: "
                    "one batch alone finds no room. Raise it, or set "
                    f"{setting} to at most {self._limit // found[part]:,.0f}."
                )
        self.row_bytes = MappingProxyType(found)
        kept = ", ".join(f"{part}: {count:,.0f}" for part, count in sorted(found.items()))
        rank_zero_info(
            f"flowtrain: this step counted the bytes of a token or patch that are kept for its backward ({kept}). From "
            f"the next one on, batches keep theirs where {self._limit:,.0f} bytes of a rank have room for them."
        )


def _longest(plan: StepPlan, role: str) -> int:
    """Tokens, or patches, of the longest batch of a role."""
    lengths = plan.lengths(role)
    return max((int(lengths[items].sum()) for own in plan.batches[role] for items in own), default=0)


def _same(tensor: Tensor) -> Tensor:
    return tensor
