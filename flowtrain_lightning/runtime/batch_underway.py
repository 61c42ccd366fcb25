"""A batch on its way through a step: what it reads, and the gradients of what it makes, as both arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

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
        sums: of gathered gradients, rows to which others are to be added, and these.
        outputs: of its forward, with their graph; None before it, or where it will be computed again.
        buffers: of its role, as a forward found them that will be computed again.
    """

    batch: RankBatch
    read: Gathering
    gradients: Gathering
    sums: tuple[tuple[slice, slice], ...] = ()
    outputs: ForwardResult | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, context: RankContext, step: Step, batch: RankBatch, copies: CopyStream) -> BatchUnderway:
        """A batch that is still to come, whose rows and gradients one stream copies."""
        read = {
            Key(step.features, step.index, each.entry): Place(each.modality, each.slices, each.again)
            for each in batch.read
        }
        given: dict[Key, Place] = {}
        end, beyond, sums = 0, sum(made.rows for made in batch.made), []
        for made in batch.made:
            if made.modality not in step.answered:  # nobody needs gradients of it
                continue
            own = slice(end, end + made.rows)
            end = own.stop
            for part in range(len(made.readers)):
                rows = own
                if part:  # behind the others, to be added once all are here: in one order, whoever comes first
                    rows = slice(beyond, beyond + made.rows)
                    beyond = rows.stop
                    sums.append((own, rows))
                given[Key(step.gradients, step.index, made.entry, part)] = Place(OWN, (rows,))
        return cls(
            batch,
            Gathering(context, read, batch.rows_read, copies, "features"),
            Gathering(context, given, {OWN: beyond}, copies, "gradients"),
            tuple(sums),
        )

    def summed_gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of the rows that it makes, once all are here: of those that several members read, the sum."""
        found = self.gradients.tensors(OWN)
        if not self.sums:
            return found
        rows = sum(made.rows for made in self.batch.made)
        for gradient in found:
            if gradient is not None:
                for own, more in self.sums:
                    gradient[own] += gradient[more]
        return tuple(None if gradient is None else gradient[:rows] for gradient in found)
