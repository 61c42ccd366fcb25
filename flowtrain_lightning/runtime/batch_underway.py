"""A batch on its way through a step: what it reads, and the gradients of what it makes, as both arrive."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.gathering import Gathering, Place
from flowtrain_lightning.runtime.program import RankBatch
from flowtrain_lightning.runtime.role_methods import ForwardResult
from flowtrain_lightning.runtime.step import RankContext, Step

OWN = "own rows"
"""Name of the rows that a batch makes."""


@dataclass
class BatchUnderway:
    """A batch on its way through a step.

    Attributes:
        batch: what it reads, and who reads it.
        read: the rows that it reads.
        gradients: of the rows that it makes.
        outputs: of its forward, with their graph; None before it, or where it will be computed again.
    """

    batch: RankBatch
    read: Gathering
    gradients: Gathering
    outputs: ForwardResult | None = None

    @classmethod
    def of(cls, context: RankContext, step: Step, batch: RankBatch, copies: CopyStream) -> BatchUnderway:
        """A batch that is still to come, whose rows and gradients one stream copies."""
        read = {Key(step.features, step.index, each.entry): Place(each.modality, each.slices) for each in batch.read}
        ends = list(accumulate(made.rows for made in batch.made))
        given = {
            Key(step.gradients, step.index, made.entry): Place(OWN, (slice(end - made.rows, end),))
            for made, end in zip(batch.made, ends, strict=True)
        }
        rows = {OWN: ends[-1] if ends else 0}
        return cls(
            batch,
            Gathering(context, read, batch.rows_read, copies, "features"),
            Gathering(context, given, rows, copies, "gradients"),
        )
