"""A stream of samples that is cut into steps: how it is cut, where it stands, its steps, and the sample buffer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.cost_model import CostModel
from flowtrain_lightning.packing.step_plan import IntArray, PackingError

Lengths = Callable[[int, int], IntArray]
"""Tokens of samples ``start`` to ``end`` of the stream; fewer where it ends."""

_USUAL_STEPS, LEAST_STEPS = 128, 4
"""Steps that an epoch should have, where nobody says how large a step is."""

_LEAST_MICROBATCHES, _MOST_MICROBATCHES = 8, 64
"""Microbatches of a step, where nobody says how many."""

_OF_A_STREAM = 32
"""Microbatches of a step of a stream of unknown length. The window that is read ahead holds some five steps."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """Settings on which the membership of steps depends, beside the stream itself; kept in the checkpoint.

    Attributes:
        token_budget: the most tokens of a microbatch.
        microbatches: of a step, over all ranks.
        balance_group: microbatches that are made alike in cost, as ranks compute them at the same time. See
            :func:`usual_balance_group`.
        cost: what a packed set of sequences costs the backbone.
        max_delay: steps that a sample may wait, counted from the step at which it is drawn.
        lookahead: steps whose samples may be drawn before they are needed.
        fill: share of the token budget that is used. Above 0.99 there is little left to balance costs with.
    """

    token_budget: int
    microbatches: int
    balance_group: int
    cost: CostModel
    max_delay: int = 8
    lookahead: int = 4
    fill: float = 0.986

    def __post_init__(self) -> None:
        for name in ("token_budget", "microbatches", "balance_group"):
            if getattr(self, name) < 1:
                raise PackingError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.microbatches % self.balance_group:
            raise PackingError(
                f"A step of {self.microbatches} microbatches cannot be made of balance groups of {self.balance_group}; "
                f"choose a balance_group that divides {self.microbatches}."
            )
        for name in ("max_delay", "lookahead"):
            if getattr(self, name) < 0:
                raise PackingError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if not 0 < self.fill <= 1:
            raise PackingError(f"fill is {self.fill}; it must be above 0 and at most 1.")

    @property
    def groups(self) -> int:
        """Balance groups of a step."""
        return self.microbatches // self.balance_group

    @property
    def step_tokens(self) -> float:
        """Tokens that a step should have."""
        return self.fill * self.groups * self.balance_group * self.token_budget

    def samples_that_fill(self, tokens: IntArray) -> int:
        """Counts the samples that fill a step on average; ``tokens``: ``[samples]`` of such samples."""
        return max(1, round(self.step_tokens / tokens.mean())) if len(tokens) else 1


def usual_balance_group(microbatches: int) -> int:
    """The balance group of a step of so many microbatches, whatever the number of ranks.

    About a quarter of them, and about 4 at least. Ranks that a group does not suffice for get microbatches of several
    groups, which are less alike; but of groups that are larger still, one alone could hold the long samples of several
    steps.
    """
    wanted = max(4.0, microbatches / 4)
    divisors = [number for number in range(1, microbatches + 1) if microbatches % number == 0]
    return min(divisors, key=lambda number: max(number / wanted, wanted / number))


def usual_microbatches(tokens: float, token_budget: int) -> int:
    """The microbatches of a step where none are named: a power of two, so that usual numbers of ranks divide it.

    So many that an epoch has about 128 steps. At least 8, so that several ranks have work, as far as an epoch then
    still has 4 steps; at most 64, which are 8 for each of 8 ranks.

    Args:
        tokens: of the data; infinite where that is not known.
        token_budget: the most tokens of a microbatch.
    """
    if math.isinf(tokens):
        return _OF_A_STREAM
    filled = tokens / (StreamSettings.fill * token_budget)
    wanted = min(max(filled / _USUAL_STEPS, _LEAST_MICROBATCHES), _MOST_MICROBATCHES, filled / LEAST_STEPS)
    return int(2 ** math.floor(math.log2(max(wanted, 1.0))))


@dataclass(frozen=True)
class StreamState:
    """The position of a stream: all that a checkpoint needs to go on with the same steps.

    Attributes:
        next_sample: the first sample that was not drawn when the running block was planned.
        next_step: the running block's first step.
        given: steps of that block already given out.
        waiting: samples that were drawn for an earlier block and wait.
        drawn: the step at which each of these was drawn.
    """

    next_sample: int = 0
    next_step: int = 0
    given: int = 0
    waiting: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamStep:
    """One step.

    Attributes:
        step: its number.
        samples: ``[n]`` numbers in the stream, rising.
        tokens: ``[n]`` tokens of each.
        bin_of: ``[n]`` the microbatch of each, ``group * balance_group + slot``.
        delay: ``[n]`` steps that each has waited.
    """

    step: int
    samples: IntArray
    tokens: IntArray
    bin_of: IntArray
    delay: IntArray


@dataclass(frozen=True)
class SampleBuffer:
    """Samples that a block may take: those that wait, then those of the stream in order.

    Attributes:
        samples: ``[n]`` numbers in the stream.
        tokens: ``[n]`` tokens of each.
        drawn: ``[n]`` the step at which each is drawn.
        waiting: how many of them wait.
        step: the block's first step.
        ended: no sample of the stream comes after them.
    """

    samples: IntArray
    tokens: IntArray
    drawn: IntArray
    waiting: int
    step: int
    ended: bool


def fill_buffer(lengths: Lengths, state: StreamState, wanted: float) -> SampleBuffer:
    """All samples that wait, and of the stream as many as have ``wanted`` tokens or a little more.

    Args:
        lengths: the stream.
        state: where it stands.
        wanted: tokens to draw of the stream.
    """
    new_tokens, ended = _draw(lengths, state.next_sample, wanted)
    waiting_tokens = [lengths(sample, sample + 1) for sample in state.waiting]
    new = np.arange(state.next_sample, state.next_sample + len(new_tokens), dtype=np.int64)
    return SampleBuffer(
        samples=np.concatenate([np.array(state.waiting, dtype=np.int64), new]),
        tokens=np.concatenate([np.empty(0, dtype=np.int64), *waiting_tokens, new_tokens]),
        drawn=np.concatenate([np.array(state.drawn, dtype=np.int64), np.full_like(new, state.next_step)]),
        waiting=len(state.waiting),
        step=state.next_step,
        ended=ended,
    )


def _draw(lengths: Lengths, start: int, wanted: float) -> tuple[IntArray, bool]:
    """Tokens of the samples from ``start`` on that have ``wanted`` together, and whether the stream ends in them."""
    found = lengths(start, start + 256)
    ended = len(found) < 256
    while not ended and found.sum() < wanted:
        more = int((wanted - found.sum()) / found.mean() * 1.02) + 64
        chunk = lengths(start + len(found), start + len(found) + more)
        ended = len(chunk) < more
        found = np.concatenate([found, chunk])
    if found.sum() < wanted:
        return found, True
    return found[: int(np.searchsorted(np.cumsum(found), wanted)) + 1], False
