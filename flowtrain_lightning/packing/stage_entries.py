"""Names, numbers and rows of what passes between the stages of a role: the hidden states of each batch.

Where context ranks share sequences, each hands on the rows of its tokens to the one that has them in the next stage.
"""

from __future__ import annotations

from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import StepPlan


def hidden_states(role: str) -> str:
    """The name of what one stage of a role makes of a batch and the next one reads: a row a token, or a patch.

    It stands where features have their modality.
    """
    return f"hidden states of {role}"


def hidden_modalities(members: StepMembers) -> dict[str, str]:
    """The names of all hidden states that pass between stages -> the role whose they are."""
    return {hidden_states(role): role for role in members.pipelines}


def stage_name(role: str, stage: int) -> str:
    """The name by which the ranks of one stage are told from those of the others."""
    return f"{role} stage {stage}"


def stage_names(role: str, stages: int) -> tuple[str, ...]:
    """The names of all stages of a role, the first one first; none where it has one only."""
    return tuple(stage_name(role, stage) for stage in range(stages if stages > 1 else 0))


def part_names(role: str, pipeline: StageSchedule) -> tuple[str, ...]:
    """The names of the parts of a role that are on ranks of their own: its stages, or the role itself."""
    return stage_names(role, pipeline.stages) or (role,)


def chunk_names(role: str, pipeline: StageSchedule) -> tuple[str, ...]:
    """The names of all runs of layers of a role, in order; of stages with one run each, those of the stages."""
    if pipeline.chunks == 1:
        return stage_names(role, pipeline.stages)
    return tuple(f"{role} layers {number}" for number in range(pipeline.runs))


def slice_name(role: str, stage: int) -> str:
    """The same of those ranks of a stage that have the same tokens; there is such a member for each context rank."""
    return f"{stage_name(role, stage)}, slices"


def hidden_entry(plan: StepPlan, members: StepMembers, role: str, run: int, slice_member: int, number: int) -> int:
    """The number of the entry of hidden states of a batch, behind those of the plan.

    Args:
        plan: of the step.
        members: of all roles.
        role: whose batch it is.
        run: of layers, that makes them, counted over all of the role.
        slice_member: member of the role, counted with its context ranks.
        number: of the batch.
    """
    first = len(plan.entries)
    for each, pipeline in members.pipelines.items():
        most = max(map(len, plan.batches[each]))
        if each == role:
            return first + (slice_member * most + number) * (pipeline.runs - 1) + run
        first += members.counts[each] * members.slices.get(each, 1) * most * (pipeline.runs - 1)
    raise ValueError(f"The {role} has all layers in one place.")
