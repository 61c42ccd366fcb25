"""One step as its lanes see it: which entries concern them, under which keys, and where features belong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flowtrain_lightning.data import Entry, StepBatch
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.pool import Key

STAGES = ("train", "val", "test", "predict")

_FEATURES, _GRADIENTS, _REPORT, _TIMES, _FIGURES, _KINDS = range(6)


@dataclass(frozen=True)
class Step:
    """A step of one stage.

    Attributes:
        batch: this rank's part.
        stage: one of ``STAGES``.
        index: counts the steps of this stage since the start of the run, alike on all ranks.
        trains: gradients go back to the encoder.
    """

    batch: StepBatch
    stage: str
    index: int
    trains: bool

    @property
    def plan(self) -> StepPlan:
        """The step's plan."""
        return self.batch.plan

    @property
    def name(self) -> tuple[int, int]:
        """Epoch and step within it, which name random streams."""
        return self.batch.epoch, self.batch.step

    @property
    def place(self) -> tuple[str, int]:
        """Stage and index, as timelines name steps."""
        return self.stage, self.index

    def phase(self, what: str) -> str:
        """What a rank does in this step, for messages: with the stage where that is not training."""
        return what if self.stage == "train" else f"{what} ({self.stage})"

    def feature_key(self, entry: int) -> Key:
        """Where the features of entry number ``entry`` are found."""
        return Key(self._first_channel + _FEATURES, self.index, entry)

    def gradient_key(self, entry: int) -> Key:
        """Where the gradients of entry number ``entry`` are found."""
        return Key(self._first_channel + _GRADIENTS, self.index, entry)

    @property
    def report_key(self) -> Key:
        """Where encoder ranks find the step's report."""
        return Key(self._first_channel + _REPORT, self.index, 0)

    @cached_property
    def entries_of_encoder_batch(self) -> dict[tuple[int, int], list[int]]:
        """(encoder rank, encoder batch) -> its entries' numbers, in the order of its rows."""
        found = defaultdict(list)
        for number, entry in enumerate(self.plan.entries):
            found[entry.encoder_rank, entry.encoder_batch].append(number)
        return dict(found)

    @cached_property
    def entries_of_microbatch(self) -> dict[tuple[int, int], list[int]]:
        """(backbone rank, microbatch) -> its entries' numbers."""
        found = defaultdict(list)
        for number, entry in enumerate(self.plan.entries):
            found[entry.backbone_rank, entry.microbatch].append(number)
        return dict(found)

    def batch_number(self, encoder_rank: int, position: int) -> int:
        """An encoder batch's number within the step, over all encoder ranks."""
        return position * len(self.plan.encoder_batches) + encoder_rank

    def microbatch_number(self, backbone_rank: int, position: int) -> int:
        """A microbatch's number within the step, over all backbone ranks."""
        return position * len(self.plan.microbatches) + backbone_rank

    @cached_property
    def _first_channel(self) -> int:
        return _first_channel(self.stage)


def times_key(index: int, encoder_rank: int) -> Key:
    """Where the first backbone rank finds how long an encoder rank's batches took in training step ``index``."""
    return Key(_first_channel("train") + _TIMES, index, encoder_rank)


def figures_key(number: int, encoder_rank: int) -> Key:
    """Where the first backbone rank finds the figures that an encoder rank tells for the ``number``-th time."""
    return Key(_first_channel("train") + _FIGURES, number, encoder_rank)


def feature_places(plan: StepPlan, entries: list[Entry]) -> tuple[int, list[list[slice]]]:
    """Where the features of one microbatch's entries belong.

    Args:
        plan: the step's plan.
        entries: all entries of one microbatch.

    Returns:
        rows of features of the microbatch, which has its media in order of appearance; and for each entry the runs of
        adjacent rows in which its own rows belong, one after another.
    """
    members = plan.microbatches[entries[0].backbone_rank][entries[0].microbatch]
    sizes = plan.sizes
    media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in members])
    ends = np.cumsum(sizes.media_rows[media])
    start = dict(zip(media.tolist(), (ends - sizes.media_rows[media]).tolist(), strict=True))
    return int(ends[-1]), [
        _runs([(start[m], int(sizes.media_rows[m])) for m in entry.media.tolist()]) for entry in entries
    ]


def _runs(places: list[tuple[int, int]]) -> list[slice]:
    """Starts and lengths as slices, those that meet as one."""
    runs: list[slice] = []
    for start, length in places:
        if runs and runs[-1].stop == start:
            start, length = runs[-1].start, length + start - runs.pop().start
        runs.append(slice(start, start + length))
    return runs


def _first_channel(stage: str) -> int:
    return STAGES.index(stage) * _KINDS
