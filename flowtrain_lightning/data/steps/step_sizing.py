"""Decides which samples are in each step, from the user's settings and the samples that there are.

A training step fills a number of microbatches, or has a number of samples; every other step has a number of samples.
None of it depends on the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.sources.sample_source import JoinedSources
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream
from flowtrain_lightning.data.steps.sampler import Sampling
from flowtrain_lightning.data.steps.stream_steps import StreamSteps
from flowtrain_lightning.data.steps.token_stream import TokenStream
from flowtrain_lightning.packing import CostModel, IntArray, PackingError
from flowtrain_lightning.packing.media_groups import MediaGroups
from flowtrain_lightning.packing.sample_stream import (
    LEAST_STEPS,
    StreamSettings,
    usual_balance_group,
    usual_microbatches,
)
from flowtrain_lightning.packing.setting_values import check_settings

GroupBy = Literal["media"]
"""Something that samples of one step may have in common."""

Steps = Sampling | TokenStream | StreamSteps
"""The steps of all epochs of a stage."""

_FIRST_OF_A_STREAM = 256
"""Samples from which it is known how long those of a stream are."""


@dataclass(frozen=True)
class TokenSteps:
    """Training steps of a number of nearly full microbatches: the section ``token_steps`` of a data module.

    A step has as many samples as its microbatches hold. Samples may wait for others like them, also past the end of an
    epoch, so none is left out. Steps are the same on any number of ranks: which samples are in a step depends on the
    data, seed, shuffling, token budget, these settings, and the backbone's cost model.

    Attributes:
        microbatches: of one step, over all ranks; best a multiple of the backbone ranks, as a step takes a few more of
            them on other numbers of ranks. None takes what suits the data, see
            :func:`~flowtrain_lightning.packing.sample_stream.usual_microbatches`.
        balance_group: microbatches that are made alike in cost, which must divide ``microbatches``: best as many as
            run at the same time, or more. None takes a checkpoint's, else about a quarter of ``microbatches``: with
            more of them, steps would differ in how many long samples they have.
        max_delay: steps that a sample may wait for others with which it fills microbatches.
    """

    microbatches: int | None = None
    balance_group: int | None = None
    max_delay: int = 8

    def __post_init__(self) -> None:
        check_settings(self, least={"microbatches": 1, "balance_group": 1, "max_delay": 0})


@dataclass(frozen=True)
class StepSizing:
    """The settings of steps.

    Attributes:
        token_budget: the most tokens of a microbatch.
        cost: what a packed set of sequences costs the backbone.
        global_batch_size: samples of a step; None takes as many as fill a training step's microbatches on average.
        token_steps: of how many microbatches training steps are; None makes them of ``global_batch_size`` samples.
        seed: of the order.
        group_by: what training samples have in common that come in one step; None: nothing.
        drop_last: leave out an epoch's last step where it has fewer samples than the others.
    """

    token_budget: int
    cost: CostModel
    global_batch_size: int | None
    token_steps: TokenSteps | None
    seed: int
    group_by: GroupBy | None = None
    drop_last: bool = True

    def training(self, source: JoinedSources | SampleStream, *, shuffle: bool) -> Steps:
        """The steps of training.

        Args:
            source: the samples.
            shuffle: samples come in another order each epoch.

        Raises:
            DataError: balance groups do not divide the microbatches, the data do not fill a step, or samples cannot be
                grouped.
        """
        if self.group_by is not None and isinstance(source, SampleStream):
            raise DataError("group_by='media' was given, but a stream is read in its own order; leave group_by out.")
        if isinstance(source, SampleStream):
            cut = self._samples(source) if self.token_steps is None else self._cut()
            return StreamSteps(source, cut, drop_last=self.drop_last)
        if self.token_steps is None:
            return self._in_samples("train", source, self._samples(source), shuffle=shuffle, training=True)
        groups = self._groups(source)
        order = Sampling(source.lengths, 1, source.weights, self.seed, shuffle=shuffle, groups=groups)
        tokens = _tokens(source)
        stream = TokenStream(order, tokens, self._cut(tokens.sum()))
        if stream.steps == 0 and self.token_steps.microbatches is None:
            # A few records to try something out: all of them are less than one microbatch.
            few = max(1, len(source) // LEAST_STEPS)
            return self._in_samples("train", source, few, shuffle=shuffle, training=True)
        if stream.steps == 0:
            raise DataError(
                f"The training data have {tokens.sum()} tokens, too few to fill microbatches={stream.microbatches} of "
                f"token_budget={self.token_budget}, so no step would be left; lower one of them, leave "
                "microbatches out (null in YAML) to have what suits the data, or give global_batch_size alone, the "
                "samples of a step."
            )
        return stream

    def in_order(self, stage: str, source: JoinedSources | SampleStream) -> Steps:
        """The steps of a stage that does not train.

        Raises:
            DataError: there are no samples.
        """
        if isinstance(source, SampleStream):
            return StreamSteps(source, self._samples(source), drop_last=False)
        return self._in_samples(stage, source, self._samples(source), shuffle=False, training=False)

    def _in_samples(self, stage: str, source: JoinedSources, size: int, *, shuffle: bool, training: bool) -> Sampling:
        weights, groups = (source.weights, self._groups(source)) if training else (None, None)
        drop_last = training and self.drop_last
        sampling = Sampling(source.lengths, size, weights, self.seed, shuffle, drop_last, groups)
        if sampling.steps == 0:
            too_few = f"{stage} has {len(source)} samples, fewer than global_batch_size={size}"
            raise DataError(f"{too_few}, so no step would be left; lower it.")
        return sampling

    def _groups(self, source: JoinedSources) -> MediaGroups | None:
        return None if self.group_by is None else media_groups_of(source)

    def _samples(self, source: JoinedSources | SampleStream) -> int:
        """Those of a step that has a number of samples."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        if isinstance(source, JoinedSources):
            tokens = _tokens(source)
            return self._cut(tokens.sum()).samples_that_fill(tokens)
        return self._cut().samples_that_fill(source.first_lengths(_FIRST_OF_A_STREAM))

    def _cut(self, tokens: float = math.inf) -> StreamSettings:
        """Cuts so many tokens into steps of a number of microbatches."""
        wanted = self.token_steps or TokenSteps()
        microbatches = wanted.microbatches or usual_microbatches(tokens, self.token_budget)
        try:
            return StreamSettings(
                token_budget=self.token_budget,
                microbatches=microbatches,
                balance_group=wanted.balance_group or usual_balance_group(microbatches),
                cost=self.cost,
                max_delay=wanted.max_delay,
            )
        except PackingError as error:
            raise DataError(str(error)) from error


def _tokens(source: JoinedSources) -> IntArray:
    """``[samples]`` of each."""
    return source.sizes(np.arange(len(source), dtype=np.int64)).tokens


def media_groups_of(source: JoinedSources) -> MediaGroups:
    """Those of all samples.

    Raises:
        DataError: it is not known of any two samples that they have one in common.
    """
    try:
        return MediaGroups.of_sizes(source.sizes(np.arange(len(source), dtype=np.int64)))
    except PackingError as error:
        raise DataError(str(error)) from None
