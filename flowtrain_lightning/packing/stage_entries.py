"""Names, numbers and rows of what passes between the stages of a trunk: the hidden states of each microbatch.

Where context ranks share sequences, each hands on the rows of its tokens to the one that has them in the next stage.
"""

from __future__ import annotations

from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_plan import StepPlan

HIDDEN = "hidden states"
"""What one stage makes of a microbatch and the next one reads, where features have their modality: a row a token."""


def stage_name(role: str, stage: int) -> str:
    """The name by which the ranks of one stage are told from those of the others."""
    return f"{role} stage {stage}"


def stage_names(role: str, stages: int) -> tuple[str, ...]:
    """The names of all stages of a role, the first one first; none where it has one only."""
    return tuple(stage_name(role, stage) for stage in range(stages if stages > 1 else 0))


def chunk_names(role: str, pipeline: StageSchedule) -> tuple[str, ...]:
    """The names of all runs of layers of a role, in order; of stages with one run each, those of the stages."""
    if pipeline.chunks == 1:
        return stage_names(role, pipeline.stages)
    return tuple(f"{role} layers {number}" for number in range(pipeline.runs))


def slice_name(role: str, stage: int) -> str:
    """The same of those ranks of a stage that have the same tokens; there is such a member for each context rank."""
    return f"{stage_name(role, stage)}, slices"


def hidden_entry(plan: StepPlan, stages: int, stage: int, slice_member: int, number: int) -> int:
    """The number of the entry of hidden states of a microbatch, behind those of the plan.

    Args:
        plan: of the step.
        stages: of the trunk, virtual ones counted.
        stage: that makes them, among these.
        slice_member: member of the trunk, counted with its context ranks.
        number: of the microbatch.
    """
    return len(plan.entries) + (slice_member * len(plan.microbatches[0]) + number) * (stages - 1) + stage
