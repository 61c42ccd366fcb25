"""Stages, the runs of layers that each holds, and the schedule by which microbatches pass through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "zb-h1", "zb-v"]
"""In which order stages work: with whole backwards (1F1B), or with weights' gradients later (zero bubble).

``"1f1b"`` is interleaved where stages hold several runs of layers. ``"zb-h1"`` and ``"zb-v"`` split each backward: its
first part gives gradients to the stage before, and what is left, the gradients of weights, fills time in which a stage
would wait (Qi et al., 2401.10241). With ``"zb-v"`` a stage holds two runs, of which the second ones go back through the
stages, so that the first stage has both ends of the model (2405.15362).
"""


Cut = Literal["time", "number"]
"""How layers are divided among stages: by the time they take, so that the head counts, or as many for each stage.

By number the first stage, which keeps most activations, has fewer layers, for which memory may be what matters.
"""

_HEAD = 4 / 3
"""Passes of a head for those of a layer: losses in chunks of tokens compute logits again in their backward."""


@dataclass(frozen=True)
class StageSchedule:
    """Stages of a role. A chunk is a run of layers that is computed by itself; chunks have numbers, in layer order.

    Attributes:
        stages: how many.
        chunks: of each stage.
        schedule: in which order they work.
        cut: how layers are divided among them.
    """

    stages: int = 1
    chunks: int = 1
    schedule: Schedule = "1f1b"
    cut: Cut = "time"

    @property
    def runs(self) -> int:
        """How many chunks there are in all."""
        return self.stages * self.chunks

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are a work of their own, behind the rest of a backward."""
        return self.schedule != "1f1b"

    @property
    def last(self) -> int:
        """The stage that has the last layers."""
        return self.stage_of(self.runs - 1)

    @staticmethod
    def head_in_layers(weights: float, weights_of_a_layer: float) -> float:
        """How many layers a head is worth by its weights, to a tenth: a plan and its run have to agree on it.

        A product takes as long as its weight is large, forward and backward. Experts of a mixture count whole, so that
        a head beside them counts for less than it takes.
        """
        return round(_HEAD * weights / max(1.0, weights_of_a_layer), 1)

    def layers(self, count: int, head: float = 0.0) -> tuple[int, ...]:
        """Divides layers among chunks: by time so that the busiest stage has as little to do as can be.

        Args:
            count: of the layers, at least one for each chunk.
            head: what follows the last layer, in layers, see `head_in_layers`.

        Returns:
            the number of layers of each chunk. Where stages could have one layer more or less, later ones have it:
            earlier ones keep the activations of more microbatches.
        """
        weight = head if self.cut == "time" else min(head, 0.5)  # by number it only decides who has one less
        of_stage = [self.chunks] * self.stages
        load = [float(self.chunks) + (weight if stage == self.last else 0.0) for stage in range(self.stages)]
        for _ in range(count - self.runs):
            least = min(range(self.stages), key=lambda stage: (load[stage], -stage))
            of_stage[least] += 1
            load[least] += 1.0
        found = [0] * self.runs
        for stage, own in enumerate(of_stage):
            each, more = divmod(own, self.chunks)
            for chunk in range(self.chunks):
                found[self.number(stage, chunk)] = each + (chunk < more)
        return tuple(found)

    def number(self, stage: int, chunk: int) -> int:
        """The number of one of a stage's chunks."""
        turned = self.schedule == "zb-v" and chunk % 2
        return chunk * self.stages + (self.stages - 1 - stage if turned else stage)

    def stage_of(self, number: int) -> int:
        """The stage that has the chunk of a number."""
        chunk, within = divmod(number, self.stages)
        return self.stages - 1 - within if self.schedule == "zb-v" and chunk % 2 else within


ONE_STAGE = StageSchedule()
"""All layers in one place."""
