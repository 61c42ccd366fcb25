"""Deals the media items that a role behind the trunk generates: in batches of one position, alike in cost."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.encoder_batches import pack_encoder_batches
from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import Batches, FloatArray, IntArray, SampleSizes, StepPlan


def batches_behind(costs: FloatArray, plan: StepPlan, members: StepMembers) -> dict[str, Batches]:
    """Role behind the trunk -> its batches, not yet cut.

    They hold media items that microbatches of one position have to say, and these positions never fall for a member:
    so a batch begins once the forwards of a position are done, and a microbatch is soon answered.

    Args:
        costs: ``[media items]`` what generating each costs; those of two roles are never compared.
        plan: says which microbatch has to say each.
        members: of all roles.
    """
    found = {}
    for role in members.behind:
        own = plan.sizes.of_modality(str(members.graph.modality_of(role)))
        found[role] = pack_encoder_batches(
            costs,
            *plan.readers,
            own,
            members=members.counts[role],
            colocated=members.colocated.get(role, ()),
            nodes=members.nodes.get(role, ()),
            reader_nodes=members.nodes.get(members.trunk, ()),
        )
    return found


def generated_items(sizes: SampleSizes, graph: RoleGraph) -> IntArray:
    """``[generated media items]`` the numbers of those that nobody encodes, ascending."""
    found = [sizes.of_modality(modality) for modality in sorted(graph.generated)]
    return np.concatenate([np.empty(0, np.int64), *found])
