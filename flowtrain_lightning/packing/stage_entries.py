"""Names and numbers of what passes between the stages of a trunk: the hidden states of each microbatch."""

from __future__ import annotations

from flowtrain_lightning.packing.step_plan import StepPlan

HIDDEN = "hidden states"
"""What one stage makes of a microbatch and the next one reads, where features have their modality: a row a token."""


def stage_name(role: str, stage: int) -> str:
    """The name by which the ranks of one stage are told from those of the others."""
    return f"{role} stage {stage}"


def stage_names(role: str, stages: int) -> tuple[str, ...]:
    """The names of all stages of a role, the first one first; none where it has one only."""
    return tuple(stage_name(role, stage) for stage in range(stages if stages > 1 else 0))


def hidden_entry(plan: StepPlan, stages: int, stage: int, member: int, number: int) -> int:
    """The number of the entry of a microbatch's hidden states, behind those of the plan.

    Args:
        plan: of the step.
        stages: of the trunk.
        stage: that makes them.
        member: of the trunk.
        number: of the microbatch.
    """
    return len(plan.entries) + (member * len(plan.microbatches[0]) + number) * (stages - 1) + stage
