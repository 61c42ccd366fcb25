"""Steps of a stream whose length is not known: which samples each has, found while the stream is read.

An epoch is one pass over the stream. Its steps are a number of samples, or of nearly full microbatches; the latter are
packed from a window that is read ahead. A position in it is kept in the checkpoint, with the samples that wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream, StreamPosition
from flowtrain_lightning.data.steps.sampler import told_number
from flowtrain_lightning.data.steps.token_stream import saved_stream, stream_state
from flowtrain_lightning.packing import CostModel, IntArray
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamState, StreamStep
from flowtrain_lightning.packing.stream_packer import StreamPacker


class StreamEnded(Exception):  # no error
    """A step was asked for that is past the end of its epoch."""


class StreamSteps:
    """The steps of all epochs, in order. One thread at a time may ask it.

    Args:
        source: the samples.
        cut: how steps of a number of microbatches are cut, or the samples of a step.
        drop_last: leave out a last step of fewer samples.
        start: epoch, number of the first step, and position in the stream from which a resumed run goes on.

    Attributes:
        settings: how steps of a number of microbatches are cut; None where they have a number of samples.
        steps: None: how many an epoch has is not known before its end.
    """

    steps = None

    def __init__(
        self,
        source: SampleStream,
        cut: StreamSettings | int,
        *,
        drop_last: bool,
        start: tuple[int, int, StreamPosition, StreamState] | None = None,
    ) -> None:
        self.settings = cut if isinstance(cut, StreamSettings) else None
        self._source = source
        self._global_batch_size = 0 if isinstance(cut, StreamSettings) else cut
        self._drop_last = drop_last
        self._start = start
        self._epoch = self._told = -1
        self._next = self._asked = 0
        self._packer: StreamPacker | None = None

    def step(self, epoch: int, step: int) -> StreamStep | IntArray:
        """The samples of a step, packed already where steps are a number of microbatches.

        Raises:
            StreamEnded: the epoch ended before.
            DataError: it has no step.
        """
        self._asked = step
        if epoch != self._epoch or step < self._next:
            self._begin(epoch, step)
        while self._next < step:
            self._take()
        return self._take()

    def state_dict(self) -> dict[str, Any]:
        """Settings that decide, beside the data, which samples are in a step; in JSON types."""
        cut = {"global_batch_size": self._global_batch_size} if self.settings is None else asdict(self.settings)
        return {"batch_unit": "samples of a stream" if self.settings is None else "tokens of a stream", **cut}

    @property
    def state(self) -> dict[str, Any]:
        """The stream's position after the step that was asked for last; in JSON types."""
        packed = StreamState() if self._packer is None else self._packer.state
        position = self._source.position(self._oldest())
        return {"epoch": self._epoch, "step": self._next, **position._asdict(), "packer": saved_stream(packed)}

    def resumed_from(
        self, settings: Mapping[str, Any], state: Mapping[str, Any], unset_settings: Set[str]
    ) -> StreamSteps:
        """These steps from a checkpoint's state on, with its settings as far as the user has set none."""
        own = self.settings
        if own is not None and "cost" in unset_settings:
            own = replace(own, cost=CostModel(**settings["cost"]))
        if own is not None and "balance_group" in unset_settings and settings["microbatches"] == own.microbatches:
            own = replace(own, balance_group=settings["balance_group"])
        position = StreamPosition(state["sample"], state["read"])
        start = (state["epoch"], state["step"], position, stream_state(state["packer"]))
        return StreamSteps(self._source, own or self._global_batch_size, drop_last=self._drop_last, start=start)

    def _begin(self, epoch: int, step: int) -> None:
        known, first, position, packed = self._start or (-1, 0, StreamPosition(), StreamState())
        if epoch != known or step < first:
            first, position, packed = 0, StreamPosition(), StreamState()
        self._epoch, self._next = epoch, first
        self._source.begin(epoch, position)
        self._packer = None if self.settings is None else StreamPacker(self.settings, self._source.lengths, packed)

    def _take(self) -> StreamStep | IntArray:
        self._source.forget(self._oldest())
        if self._packer is not None:
            found = next(self._packer, None)
            if found is None:
                raise self._ended(len(self._packer.left()))
            self._next += 1
            return found
        start = self._next * self._global_batch_size
        count = len(self._source.lengths(start, start + self._global_batch_size))
        if count == 0 or (self._drop_last and count < self._global_batch_size):
            raise self._ended(count)
        self._next += 1
        return np.arange(start, start + count, dtype=np.int64)

    def _ended(self, left: int) -> StreamEnded:
        """The end of an epoch, which is told once.

        Args:
            left: samples that are in no step.

        Raises:
            DataError: the epoch has no step at all.
        """
        what = f"global_batch_size={self._global_batch_size}"
        if self.settings is not None:
            what = f"microbatches={self.settings.microbatches} of token_budget={self.settings.token_budget}"
        if self._next == 0:
            raise DataError(
                f"{self._source.summary}. These are too few for one step of {what}, so an epoch would have none; lower "
                "it, or give more data."
            )
        if self._told != self._epoch and self._asked == self._next:  # of several workers one is asked for this step
            rank_zero_info(
                f"{self._source.summary}; {told_number(self._next, 'step')} of {what}, "
                f"{told_number(left, 'sample')} left out at the end of epoch {self._epoch}."
            )
            self._told = self._epoch
        return StreamEnded()

    def _oldest(self) -> int:
        """The first sample that a later step may have."""
        if self._packer is None:
            return self._next * self._global_batch_size
        return min([*self._packer.state.waiting, self._packer.state.next_sample])
