"""Tensors whose rows come through the pool by entries: features for who reads them, gradients for who made them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.step import RankContext, Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION


class Place(NamedTuple):
    """The place of an entry's rows.

    Attributes:
        name: of the tensors.
        slices: the runs of adjacent rows that they become, one after another.
    """

    name: str
    slices: tuple[slice, ...]


class Gathering:
    """Tensors that are gathered from entries as these arrive.

    Args:
        context: what the rank works with.
        missing: key of each entry -> where its rows belong.
        rows: name -> rows of its tensors in all.
        copies: the stream that copies them.
        what: they are, for the timeline.

    Attributes:
        missing: key of an entry that is not here yet -> where its rows belong.
        copies: the stream that copies them.
    """

    def __init__(
        self, context: RankContext, missing: Mapping[Key, Place], rows: Mapping[str, int], copies: CopyStream, what: str
    ) -> None:
        self.missing = dict(missing)
        self.copies = copies
        self._context = context
        self._rows = rows
        self._what = what
        self._tensors: dict[str, list[Tensor | None]] = {}
        self._absent: set[tuple[str, int]] = set()  # of which some entry had no rows, before any had one

    def tensors(self, name: str) -> tuple[Tensor | None, ...]:
        """Those of one name; None for one of which no entry had rows: a gradient that is not there."""
        return tuple(self._tensors.get(name, ()))

    @property
    def names(self) -> list[str]:
        """Of all tensors of which something is here."""
        return sorted(self._tensors)

    def take_arrived(self, role: str, step: Step) -> bool:
        """Copies entries that have arrived and releases them at once; says whether there were any.

        Args:
            role: whose time it is.
            step: the step that runs.
        """
        context = self._context
        arrived = context.pool.arrived(self.missing) if self.missing else []
        if not arrived:
            return False
        with self.copies.copying():
            leases = list(map(context.pool.get, arrived))  # on a GPU this stream waits for them here
            start = context.timeline.start()
            for key, lease in zip(arrived, leases, strict=True):
                assert lease is not None, "it has arrived"
                name, slices = self.missing.pop(key)
                for level, part in enumerate(lease.tensors):
                    self._take(name, level, slices, part)
                lease.release()
            context.timeline.stop(start, role, COMMUNICATION, self._what, step.stage, step.index)
        return True

    def _take(self, name: str, level: int, slices: tuple[slice, ...], part: Tensor) -> None:
        tensors = self._tensors.setdefault(name, [])
        tensors += [None] * (level + 1 - len(tensors))
        whole = tensors[level]
        if not part.shape[0] and any(run.stop > run.start for run in slices):  # no rows stand for no gradient
            if whole is None:
                self._absent.add((name, level))
            else:
                for run in slices:
                    whole[run].zero_()
            return
        if whole is None:
            allocate = torch.zeros if (name, level) in self._absent else torch.empty  # each row is written once
            shape = (self._rows[name], *part.shape[1:])
            whole = tensors[level] = allocate(shape, dtype=part.dtype, device=self._context.compute.device)
        taken = 0
        for run in slices:
            count = run.stop - run.start
            whole[run].copy_(part[taken : taken + count], non_blocking=True)  # host memory of the pool is pinned
            taken += count
