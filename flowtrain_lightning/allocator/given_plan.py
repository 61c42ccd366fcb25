"""What an allocation that is given takes, by the models of time and memory."""

from __future__ import annotations

from flowtrain_lightning.allocator.allocation import Allocation
from flowtrain_lightning.allocator.candidates import Candidate, evaluate, why_undividable
from flowtrain_lightning.allocator.placements import ModelledPlan, Problems, plan_from, side_by_side
from flowtrain_lightning.allocator.role_layout import BACKBONE, PlanningError
from flowtrain_lightning.allocator.role_problem import RoleProblem, family_of


def given_plan(problems: Problems, allocation: Allocation) -> ModelledPlan:
    """The plan that an allocation is. It may need more memory than there is; see its ``peak_bytes``.

    Args:
        problems: role -> what is planned for.
        allocation: for all devices of the problems' cluster.

    Raises:
        PlanningError: it has other roles or devices, or its degrees do not divide heads, layers or nodes.
    """
    cluster = problems[BACKBONE].cluster
    if set(allocation.layouts) != set(problems):
        raise PlanningError(
            f"The allocation has the roles {', '.join(allocation.layouts)}, but the module has {', '.join(problems)}."
        )
    if allocation.size != cluster.devices:
        raise PlanningError(
            f"The allocation is for {allocation.size} devices, but {cluster.devices} are planned for; give --devices "
            f"{allocation.size}."
        )
    chosen = {role: _candidate(problem, allocation) for role, problem in problems.items()}
    encoding = sum(one.seconds for role, one in chosen.items() if role != BACKBONE)
    backbone = chosen[BACKBONE]
    if allocation.placement == "separate":
        return side_by_side(problems, chosen)
    if allocation.placement == "mixed":
        shared = encoding + backbone.seconds * backbone.devices / cluster.devices
        return plan_from("mixed", problems, chosen, seconds=max(shared, backbone.seconds))
    return plan_from("colocated", problems, chosen, seconds=encoding + backbone.seconds)


def _candidate(problem: RoleProblem, allocation: Allocation) -> Candidate:
    role = problem.role
    layout = allocation.layouts[role]
    recompute, offload = allocation.recompute.get(role, "none"), allocation.offload.get(role, "none")
    reason = why_undividable(problem, layout.tensor, layout.pipeline, layout.context)
    if reason is not None:
        raise PlanningError(reason)
    found = evaluate(problem, family_of(layout, recompute, offload))
    return Candidate(role, layout, recompute, float(found.time.total[0]), float(found.memory.total[0]), offload)
