"""Tensors whose rows come through the pool by entries: features for who reads them, gradients for who made them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.step import OTHER_STEPS, RankContext, Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION


class Place(NamedTuple):
    """The place of an entry's rows.

    Attributes:
        name: of the tensors.
        slices: the runs of adjacent rows that they become, one after another.
        again: rows of the entry that go to further rows.
    """

    name: str
    slices: tuple[slice, ...]
    again: tuple[tuple[slice, slice], ...] = ()


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
        shared: key of an entry that belongs to several such tensors -> all of them: whichever takes it serves them all.
    """

    def __init__(
        self, context: RankContext, missing: Mapping[Key, Place], rows: Mapping[str, int], copies: CopyStream, what: str
    ) -> None:
        self.missing = dict(missing)
        self.copies = copies
        self.shared: dict[Key, list[Gathering]] = {}
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

    def take_arrived(self, role: str, step: Step, among: Collection[Key] | None = None) -> bool:
        """Copies entries that have arrived and releases them at once; says whether there were any.

        Args:
            role: whose time it is.
            step: the step that runs.
            among: keys of those that may be taken; None: all.

        Raises:
            ValueError: rows are of another kind than others before them, or not as many as belong there.
        """
        context = self._context
        wanted = self.missing if among is None else [key for key in among if key in self.missing]
        arrived = context.pool.arrived(wanted) if wanted else []
        if not arrived:
            return False
        with self.copies.copying():
            leases = list(map(context.pool.get, arrived))  # on a GPU this stream waits for them here
            start = context.timeline.start()
            for key, lease in zip(arrived, leases, strict=True):
                assert lease is not None, "it has arrived"
                for gathering in self.shared.get(key, (self,)):
                    place = gathering.missing.pop(key)
                    for level, part in enumerate(lease.tensors):
                        gathering._take(level, place, part)
                lease.release()
            context.timeline.stop(start, role, COMMUNICATION, self._what, step.stage, step.index)
        return True

    def _take(self, level: int, place: Place, part: Tensor) -> None:
        name, slices, again = place
        tensors = self._tensors.setdefault(name, [])
        tensors += [None] * (level + 1 - len(tensors))
        whole = tensors[level]
        if not part.shape[0] and any(run.stop > run.start for run in slices):  # no rows stand for no gradient
            if whole is None:
                self._absent.add((name, level))
            else:
                for run in (*slices, *(to for _, to in again)):
                    whole[run].zero_()
            return
        if whole is None:
            allocate = torch.zeros if (name, level) in self._absent else torch.empty  # each row is written once
            shape = (self._rows[name], *part.shape[1:])
            whole = tensors[level] = allocate(shape, dtype=part.dtype, device=self._context.compute.device)
        if part.dtype != whole.dtype or part.shape[1:] != whole.shape[1:]:  # whichever came first would decide
            raise ValueError(
                f"The {self._what} of {name!r} come in rows of {list(whole.shape[1:])} {whole.dtype} and of "
                f"{list(part.shape[1:])} {part.dtype}. What one batch reads is of one kind: return rows as wide and of "
                "the same type from every call of a method."
            )
        if (rows := sum(run.stop - run.start for run in slices)) != part.shape[0]:
            raise ValueError(f"The {self._what} of {name!r} have {part.shape[0]} rows, not {rows}. {OTHER_STEPS}")
        taken = 0
        for run in slices:
            count = run.stop - run.start
            whole[run].copy_(part[taken : taken + count], non_blocking=True)  # host memory of the pool is pinned
            taken += count
        for run, to in again:
            whole[to].copy_(part[run], non_blocking=True)
