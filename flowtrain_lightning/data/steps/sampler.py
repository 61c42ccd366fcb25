"""Samples of each step in the order of a sampler, and the step that a loader reads next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import SequentialSampler

from flowtrain_lightning.data.steps.step_packing import CostChange, StepPacking
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.media_groups import MediaGroups


@dataclass(frozen=True)
class Sampling:
    """The order of all epochs: pure functions of seed, epoch, lengths and weights, without ranks, layouts or workers.

    An epoch has as many samples as all sources together. Each source gives its share of them: its length, or with
    weights its weight's part (rounded to whole samples). A source is read in permutations of itself, one after
    another and on through the epochs, so that it starts again with a fresh one only when it has run out. Unshuffled,
    every epoch is the same: each source from its beginning, and the sources evenly mixed.

    Attributes:
        lengths: samples of each source.
        global_batch_size: samples of one step.
        weights: of each source; None takes the lengths.
        seed: of all permutations.
        shuffle: False keeps the order of the sources.
        drop_last: leave out an epoch's last step if it would be smaller; shuffled, other samples fall out each time.
        groups: samples that come side by side; None: each by itself.
    """

    lengths: tuple[int, ...]
    global_batch_size: int
    weights: tuple[float, ...] | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    groups: MediaGroups | None = None

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size is {self.global_batch_size}; it must be at least 1.")
        if self.weights is not None and (min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError(f"The weights of the files are {self.weights}; give none below 0, and one above.")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative.")

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        whole, rest = divmod(sum(self.lengths), self.global_batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    @property
    def samples_per_step(self) -> int:
        """Samples of a step."""
        return self.global_batch_size

    @property
    def summary(self) -> str:
        """Describes an epoch, for the log."""
        samples = sum(self.lengths)
        rest = samples % self.global_batch_size
        steps = told_number(self.steps, "step")
        told = f"{told_number(samples, 'sample')} make {steps} of global_batch_size={self.global_batch_size} an epoch"
        if rest == 0:
            return f"{told}, none left out."
        if not self.drop_last:
            return f"{told}, the last of {rest}."
        which = "others each time" if self.shuffle else "the same each time"
        left = f"{told_number(rest, 'sample')} left out of each, {which}"
        return f"{told}; {left}; drop_last=False makes a smaller step of them."

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples that each source gives to an epoch: by largest remainder, the earlier source first."""
        if self.weights is None:
            return self.lengths
        exact = np.asarray(self.weights) * (sum(self.lengths) / sum(self.weights))
        shares = np.floor(exact).astype(np.int64)
        missing = sum(self.lengths) - int(shares.sum())
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
        return tuple(shares.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Settings that decide, beside the data, which samples are in a step; in JSON types."""
        settings = asdict(replace(self, groups=None))
        del settings["lengths"], settings["groups"]
        weights = self.weights and list(self.weights)
        return {"batch_unit": "samples", **settings, "weights": weights, **self.grouping}

    @property
    def grouping(self) -> dict[str, str]:
        """The part of a checkpoint that says how samples are grouped."""
        return {} if self.groups is None else {"group_by": "media"}

    def step(self, epoch: int, step: int) -> IntArray:
        """``[global_batch_size]``, or fewer in an epoch's last step: its samples, counted over the sources in order."""
        start = step * self.global_batch_size
        return epoch_order(self, epoch)[start : start + self.global_batch_size]


def told_number(number: int, of: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


@lru_cache(maxsize=2)
def epoch_order(sampling: Sampling, epoch: int) -> IntArray:
    """``[samples]`` all samples of an epoch in order; the array must not be changed."""
    chosen, fractions = [], []
    first = 0
    for source, (length, share) in enumerate(zip(sampling.lengths, sampling.shares, strict=True)):
        start = epoch * share if sampling.shuffle else 0
        chosen.append(first + _run(sampling, source, length, start, start + share))
        fractions.append((np.arange(share) + 0.5) / max(share, 1))  # how far into the epoch, unshuffled
        first += length
    samples = np.concatenate(chosen)
    if len(sampling.lengths) > 1:
        if sampling.shuffle:
            mixed = _permutation(len(samples), sampling.seed, 0, epoch)
        else:
            mixed = np.argsort(np.concatenate(fractions), kind="stable")
        samples = samples[mixed]
    if sampling.groups is not None:
        samples = sampling.groups.ordered(samples, sampling.global_batch_size)
    samples.flags.writeable = False
    return samples


def _run(sampling: Sampling, source: int, length: int, start: int, end: int) -> IntArray:
    """Samples ``start`` to ``end`` of a source's endless sequence of permutations."""
    if length == 0 or start == end:
        return np.empty(0, dtype=np.int64)
    rounds = range(start // length, (end - 1) // length + 1)
    order = [
        _permutation(length, sampling.seed, 1 + source, number) if sampling.shuffle else np.arange(length)
        for number in rounds
    ]
    offset = rounds.start * length
    return np.concatenate(order)[start - offset : end - offset]


def _permutation(length: int, *key: int) -> IntArray:
    # NumPy promises that a bit generator's raw numbers never change between its versions; of `permutation` it does not.
    return np.argsort(np.random.PCG64(list(key)).random_raw(length), kind="stable")


class StepSampler(SequentialSampler):
    """The steps that a loader's next iterator reads, with the packing that holds in each of them.

    Steps come in sequence, shuffled or not: what is shuffled is which samples they have.

    Args:
        steps: steps of an epoch; None where that is not known before its end.
        packing: how samples are packed, where no change says otherwise.

    Attributes:
        steps: steps of an epoch; None where that is not known.
        packing: how samples are packed, where no change says otherwise.
        epoch: the epoch that the next iterator reads; Lightning sets it.
        first: the step at which that iterator begins.
        planned: epoch and number of the step that was handed out last.
        changes: cost models that take the place of those of ``packing``, each from its step on, in order.
    """

    def __init__(self, steps: int | None, packing: StepPacking) -> None:
        super().__init__(range(steps or 0))
        self.steps = steps
        self.packing = packing
        self.epoch = 0
        self.first = 0
        self.planned = (0, -1)
        self.changes: list[CostChange] = []

    def set_epoch(self, epoch: int) -> None:
        """The next iterator that starts will read this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("How many steps an epoch of a stream has is not known.")
        return self.steps

    def __iter__(self) -> Iterator[tuple[int, int, StepPacking]]:  # type: ignore[override]
        return self._hand_out(self.epoch, self.first)

    def _hand_out(self, epoch: int, first: int) -> Iterator[tuple[int, int, StepPacking]]:
        for step in count(first) if self.steps is None else range(first, self.steps):
            self.planned = (epoch, step)
            yield epoch, step, self._packing_in(epoch, step)

    def _packing_in(self, epoch: int, step: int) -> StepPacking:
        begun = [change for change in self.changes if change.position <= (epoch, step)]
        return self.packing.with_costs(begun[-1]) if begun else self.packing
