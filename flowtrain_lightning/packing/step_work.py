"""What the lanes of a step compute, and on which ranks: what the simulator simulates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from flowtrain_lightning.packing.step_plan import IntArray, StepPlan, SyncEvery, Turn

FORWARD_SHARE = 1 / 3
"""The forward's share of what an encoder batch costs when the encoder trains: a backward is two forwards."""


@dataclass(frozen=True)
class EncoderWork:
    """One encoder batch.

    Attributes:
        forward: time of its forward.
        backward: time of its backward; 0 where the encoder does not train.
        readers: ``(backbone lane, position)`` of the microbatches that read it.
        recomputed: nothing is kept of its forward, which runs again before its backward.
        before: batches of its lane, for the same position, that come before it.
    """

    forward: float
    backward: float
    readers: tuple[tuple[int, int], ...]
    recomputed: bool = False
    before: int = 0

    @property
    def turn(self) -> Turn:
        """When it is due."""
        return min(position for _, position in self.readers), self.before


@dataclass(frozen=True)
class StepWork:
    """What there is to compute in one step.

    Attributes:
        microbatches: ``[backbone lane][position]`` time of forward and backward together.
        encoder_batches: ``[encoder lane][number]``.
    """

    microbatches: Sequence[Sequence[float]]
    encoder_batches: Sequence[Sequence[EncoderWork]]

    def on_ranks(self, backbone: int, encoder: int) -> StepWork:
        """The same with a lane for every rank of members that have so many ranks, all of which do what the member does.

        Times stay those of the member, of whose work each of its ranks does a part.
        """

        def readers(batch: EncoderWork) -> tuple[tuple[int, int], ...]:
            return tuple((backbone * lane + rank, number) for lane, number in batch.readers for rank in range(backbone))

        batches = [[replace(batch, readers=readers(batch)) for batch in member] for member in self.encoder_batches]
        return StepWork(
            [member for member in self.microbatches for _ in range(backbone)],
            [member for member in batches for _ in range(encoder)],
        )


def step_work(
    plan: StepPlan,
    microbatch_time: Callable[[IntArray], float],
    encoder_batch_time: Callable[[IntArray], tuple[float, float]],
    recomputed: Sequence[Collection[int]] | None = None,
) -> StepWork:
    """What a plan has its lanes compute.

    Args:
        plan: who encodes and who reads what.
        microbatch_time: time of forward and backward together, by the tokens of its sequences.
        encoder_batch_time: time of forward and of backward, by the patches of its media items.
        recomputed: for each encoder rank the numbers of its recomputed batches; None for none.
    """
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for entry in plan.entries:
        readers.setdefault((entry.encoder_rank, entry.encoder_batch), []).append(
            (entry.backbone_rank, entry.microbatch)
        )
    sizes = plan.sizes
    encoder_batches = [
        [
            EncoderWork(
                *encoder_batch_time(sizes.media_patches[media]),
                readers=tuple(readers[rank, number]),
                recomputed=recomputed is not None and number in recomputed[rank],
                before=plan.encoder_turns[rank][number][1],
            )
            for number, media in enumerate(batches)
            if len(media)
        ]
        for rank, batches in enumerate(plan.encoder_batches)
    ]
    microbatches = [[microbatch_time(sizes.tokens[m]) if len(m) else 0.0 for m in rank] for rank in plan.microbatches]
    return StepWork(microbatches, encoder_batches)


@dataclass(frozen=True)
class Lanes:
    """Who computes, and what the simulator's rules leave open.

    Attributes:
        backbone: the rank of each backbone lane.
        encoder: the rank of each encoder lane.
        sync_every: how often backbone lanes wait for each other.
        kept_batches: encoder batches per lane whose activations may be kept at a time; None sets no limit.
        encoder_first: no microbatch begins before all encoder forwards of the step are done.
        steps_ahead: later steps that ranks which only encode may have begun; 0 where the encoder trains.
        backbone_group: neighbouring backbone lanes that share the work of each microbatch, and so begin it together.
        encoder_group: neighbouring encoder lanes that share the work of each encoder batch, and so begin it together.
        in_fixed_order: ranks need each other to compute, so that those with both lanes have a fixed order, see
            `LaneOrder`.
    """

    backbone: tuple[int, ...]
    encoder: tuple[int, ...]
    sync_every: SyncEvery
    kept_batches: int | None = None
    encoder_first: bool = False
    steps_ahead: int = 0
    backbone_group: int = 1
    encoder_group: int = 1
    in_fixed_order: bool = False

    @classmethod
    def separate(cls, work: StepWork, *, sync_every: SyncEvery, kept_batches: int | None = None) -> Lanes:
        """Every lane of ``work`` on a rank of its own."""
        backbone, encoder = len(work.microbatches), len(work.encoder_batches)
        return cls(tuple(range(backbone)), tuple(range(backbone, backbone + encoder)), sync_every, kept_batches)

    @property
    def backbone_groups(self) -> tuple[range, ...]:
        """Backbone lanes that begin every microbatch together, group by group."""
        return _neighbours(len(self.backbone), 0 if self.sync_every == "microbatch" else self.backbone_group)

    @property
    def encoder_groups(self) -> tuple[range, ...]:
        """Encoder lanes that begin every encoder batch together, group by group."""
        return _neighbours(len(self.encoder), self.encoder_group)

    @property
    def ranks(self) -> set[int]:
        """All ranks that have a lane."""
        return {*self.backbone, *self.encoder}


def _neighbours(lanes: int, size: int) -> tuple[range, ...]:
    """All lanes in groups of ``size`` neighbours; 0 is one group of all."""
    return tuple(range(first, first + (size or lanes)) for first in range(0, lanes, size or max(1, lanes)))
