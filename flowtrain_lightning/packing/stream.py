"""Which samples are in which step when a step is a number of tokens: blocks of steps, planned from an endless stream.

A block is a few steps that are planned together. Its samples are sorted into rows of microbatches that cost the same;
rows are then dealt to the block's steps so that every step has its share of short and long samples. A sample that is
dearer than any row of its block can be waits for a later block, in which others like it have come together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain_lightning.packing.block import Block, plan_block
from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.errors import PackingError
from flowtrain_lightning.packing.holding import Shape
from flowtrain_lightning.packing.plan import IntArray

Lengths = Callable[[int, int], IntArray]
"""Tokens of samples ``start`` to ``end`` of the stream; fewer where it ends."""


@dataclass(frozen=True)
class StreamSettings:
    """What the membership of steps depends on, beside the stream itself; kept in the checkpoint.

    Attributes:
        token_budget: the most tokens of a microbatch.
        row_width: microbatches of a row: those that run at the same time. The rank count of the first run, and the
            same ever after, so that another layout gets the same steps.
        rows: rows of a step.
        cost: what a packed set of sequences costs the backbone.
        max_delay: steps that a sample may wait, counted from the step at which it is drawn.
        lookahead: steps whose samples may be drawn before they are needed.
        fill: share of the token budget that is used. Above 0.99 there is little left to even out costs with.
    """

    token_budget: int
    row_width: int
    rows: int
    cost: CostModel
    max_delay: int = 8
    lookahead: int = 4
    fill: float = 0.986

    def __post_init__(self) -> None:
        for name in ("token_budget", "row_width", "rows"):
            if getattr(self, name) < 1:
                raise PackingError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("max_delay", "lookahead"):
            if getattr(self, name) < 0:
                raise PackingError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if not 0 < self.fill <= 1:
            raise PackingError(f"fill is {self.fill}; it must be above 0 and at most 1.")


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands: all that a checkpoint needs to go on with the same steps.

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
        bin_of: ``[n]`` the microbatch of each, ``row * row_width + column``.
        delay: ``[n]`` steps that each has waited.
    """

    step: int
    samples: IntArray
    tokens: IntArray
    bin_of: IntArray
    delay: IntArray


@dataclass
class StreamPacker:
    """Cuts a stream of samples into steps, one after another.

    Attributes:
        settings: what the steps depend on.
        lengths: the stream.
        state: where it stands; saved and given again, the steps go on as if nothing had happened.
    """

    settings: StreamSettings
    lengths: Lengths
    state: StreamState = field(default_factory=StreamState)
    _block: Block | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[StreamStep]:
        return self

    def __next__(self) -> StreamStep:
        if self._block is None:
            self._block = self._plan()
        if self.state.given == self._block.steps:
            if self._block.steps == 0:
                raise StopIteration
            self.state = self._following(self._block)
            self._block = self._plan()
            return next(self)
        block, offset = self._block, self.state.given
        members = np.flatnonzero(block.step_of == offset)
        members = members[np.argsort(block.samples[members], kind="stable")]
        number = self.state.next_step + offset
        self.state = replace(self.state, given=offset + 1)
        return StreamStep(
            number, block.samples[members], block.tokens[members], block.bin_of[members], number - block.drawn[members]
        )

    def left(self) -> IntArray:
        """Samples that no step took, once the stream has ended: too few for one more step."""
        block = self._block or self._plan()
        rest = self.lengths(block.next_sample, 1 << 62)
        undrawn = np.arange(block.next_sample, block.next_sample + len(rest), dtype=np.int64)
        return np.sort(np.concatenate([block.samples[block.step_of < 0], undrawn]))

    def _plan(self) -> Block:
        settings, state = self.settings, self.state
        waiting = np.array(state.waiting, dtype=np.int64)
        tokens = [self.lengths(sample, sample + 1) for sample in state.waiting]
        return plan_block(
            self.lengths,
            state.next_sample,
            state.next_step,
            (waiting, np.concatenate([np.empty(0, dtype=np.int64), *tokens]), np.array(state.drawn, dtype=np.int64)),
            shape=Shape(settings.rows, settings.row_width, settings.token_budget),
            fill=settings.fill,
            max_delay=settings.max_delay,
            lookahead=settings.lookahead,
            cost=settings.cost,
        )

    def _following(self, block: Block) -> StreamState:
        waits = np.flatnonzero(block.step_of < 0)
        return StreamState(
            next_sample=block.next_sample,
            next_step=self.state.next_step + block.steps,
            waiting=tuple(block.samples[waits].tolist()),
            drawn=tuple(block.drawn[waits].tolist()),
        )
