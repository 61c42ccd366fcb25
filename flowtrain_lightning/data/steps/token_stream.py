"""Steps of a number of microbatches: which samples each has, found by packing all epochs as one endless stream.

:class:`~flowtrain_lightning.packing.stream_packer.StreamPacker` cuts the stream into steps. A sample that waits may so
pass the end of an epoch, and none is lost there. An epoch is as many steps as one pass over the data fills, the same
number each time; where it ends, the next one goes on.

What is in step ``k`` follows from all samples before it. Packing them takes microseconds a sample, so every process
that loads runs the whole stream for itself and takes the steps that it is asked for: nothing is sent between processes,
no rank waits for another, and all find the same. A checkpoint keeps the packer's state, so that a resumed run starts
from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from flowtrain_lightning.data.steps.sampler import Sampling, epoch_order, told_number
from flowtrain_lightning.packing import CostModel, IntArray
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamState, StreamStep
from flowtrain_lightning.packing.stream_packer import StreamPacker

_MEASURED_STEPS = 16
"""Steps from which it is known how many tokens a step takes: packing fills steps alike."""


class TokenStream:
    """The steps of all epochs. Knows nothing of this run's ranks. One thread at a time may ask it.

    Args:
        sampling: the order of the samples; what it says of steps is not used.
        tokens: ``[samples]`` of each sample of the data.
        settings: how the stream is cut.
        start: the state from which to pack on, instead of from the stream's beginning.

    Attributes:
        settings: how the stream is cut.
        steps: steps of an epoch: what one pass over the data fills, the same for any balance group; perhaps 0.
    """

    def __init__(
        self, sampling: Sampling, tokens: IntArray, settings: StreamSettings, start: StreamState | None = None
    ) -> None:
        self.settings = settings
        self._sampling = sampling
        self._tokens = tokens
        self._start = start or StreamState()
        self._packer: StreamPacker | None = None
        self.steps = self._steps_of_a_pass()

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, over all ranks."""
        return self.settings.microbatches

    @property
    def samples_per_step(self) -> int:
        """Samples of a step, on average."""
        return self.settings.samples_that_fill(self._tokens)

    @property
    def summary(self) -> str:
        """Describes an epoch, for the log."""
        samples, steps = len(self._tokens), told_number(self.steps, "step")
        told = f"{told_number(samples, 'sample')} make {steps} of microbatches={self.microbatches} an epoch"
        if self._sampling.shuffle:
            return f"{told}; those that fill none go on into the next epoch."
        taken = islice(StreamPacker(self.settings, self._lengths), self.steps)
        left = samples - sum(int((step.samples < samples).sum()) for step in taken)
        return f"{told}; {told_number(left, 'sample')} left out of each, the same each time."

    def step(self, epoch: int, step: int) -> StreamStep:
        """A step of an epoch; its samples are positions in the stream, see :meth:`samples`."""
        # Unshuffled, every epoch is the same, so each begins the stream anew.
        number = epoch * self.steps + step if self._sampling.shuffle else step
        if self._packer is None or _next_step(self._packer.state) > number:
            start = self._start if _next_step(self._start) <= number else StreamState()
            self._packer = StreamPacker(self.settings, self._lengths, start)
        return next(found for found in self._packer if found.step == number)

    @property
    def state(self) -> StreamState:
        """The packer's state after the step that was asked for last."""
        return self._start if self._packer is None else self._packer.state

    def samples(self, positions: IntArray) -> IntArray:
        """``[n]`` the samples of the data at ``positions``, ``[n]``, of the stream."""
        epochs, offsets = np.divmod(positions, len(self._tokens))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            found[epochs == epoch] = epoch_order(self._sampling, epoch)[offsets[epochs == epoch]]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Settings that decide, beside the data, which samples are in a step; in JSON types."""
        weights = self._sampling.weights and list(self._sampling.weights)
        order = {"weights": weights, "seed": self._sampling.seed, "shuffle": self._sampling.shuffle}
        found = {"steps_of_an_epoch": self.steps, "sizes_of_samples": self._sizes}
        return {"batch_unit": "tokens", **found, **order, **self._sampling.grouping, **asdict(self.settings)}

    @cached_property
    def _sizes(self) -> str:
        """Changes with any sample's tokens, and so wherever images were changed in size: steps are then others."""
        return hashlib.blake2b(self._tokens.tobytes(), digest_size=12).hexdigest()

    def resumed_from(self, state: Mapping[str, Any], start: StreamState, unset_settings: Set[str]) -> TokenStream:
        """This stream from a checkpoint's state on, with its settings as far as the user has set none."""
        settings = self.settings
        if "cost" in unset_settings:
            settings = replace(settings, cost=CostModel(**state["cost"]))
        if "balance_group" in unset_settings and state["microbatches"] == self.microbatches:
            settings = replace(settings, balance_group=state["balance_group"])
        return TokenStream(self._sampling, self._tokens, settings, start)

    def _steps_of_a_pass(self) -> int:
        sampling, settings, first, whole = self._sampling, self.settings, 0, 0
        for length, share in zip(sampling.lengths, sampling.shares, strict=True):
            whole += int(self._tokens[first : first + length].sum()) * share // max(length, 1)
            first += length
        in_one_group = replace(settings, balance_group=self.microbatches)
        filled = count = 0
        for step in islice(StreamPacker(in_one_group, self._lengths), _MEASURED_STEPS):
            filled, count = filled + int(step.tokens.sum()), count + 1
            if filled >= whole:
                break
        return whole * count // filled

    def _lengths(self, start: int, end: int) -> IntArray:
        size = len(self._tokens)
        parts = []
        for epoch in range(start // size, (end - 1) // size + 1):
            first = epoch * size
            order = epoch_order(self._sampling, epoch)[max(start - first, 0) : end - first]
            parts.append(self._tokens[order])
        return np.concatenate(parts)


def saved_stream(state: StreamState) -> dict[str, Any]:
    """A state in JSON types."""
    return {**asdict(state), "waiting": list(state.waiting), "drawn": list(state.drawn)}


def stream_state(state: Mapping[str, Any]) -> StreamState:
    """The state that was saved."""
    numbers = {name: state[name] for name in ("next_sample", "next_step", "given")}
    return StreamState(**numbers, waiting=tuple(state["waiting"]), drawn=tuple(state["drawn"]))


def _next_step(state: StreamState) -> int:
    return state.next_step + state.given
