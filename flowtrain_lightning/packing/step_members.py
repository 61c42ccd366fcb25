"""The data-parallel members that work on a step: how many each role has, where they are, and which need each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain_lightning.packing.role_graph import ROLES, RoleGraph, graph_of
from flowtrain_lightning.packing.stage_schedule import ONE_STAGE, StageSchedule
from flowtrain_lightning.packing.step_graph import Meeting, any_binds

TWO_ROLES = graph_of(ROLES)
"""The graph of a module that names no roles of its own."""


@dataclass(frozen=True)
class StepMembers:
    """The data-parallel members of all roles. Each works on batches of its own; its ranks share them.

    Attributes:
        counts: role -> its members.
        graph: the roles, and what flows between them.
        nodes: role -> the node of each member, so that media items are encoded near their readers; empty where there is
            one node.
        colocated: role -> its member and the trunk's member of each process that has both; without the roles that share
            no process with the trunk.
        meets: role -> which of its ranks begin a pass together; each by itself where a role is missing.
        local: every rank encodes just the media that it reads (plain Lightning).
        producers_per_rank: for how many roles that encode a rank works at most.
        pipelines: role -> its stages, each of some of its layers, and how they work; without the roles that have all
            of their layers in one place.
        slices: role -> how many ranks of a member have some of its tokens each (context ranks); without those that
            have all.
        searched: role, or stage of one -> the rank of each member, where one order of all works is searched; empty
            where rules of each role decide.
        activation_bytes: of activations that a rank may keep for backwards, where one order is searched; None for no
            limit.
        moving: roles whose activations lie in host memory where they find no room; those of others are computed again.
    """

    counts: Mapping[str, int]
    graph: RoleGraph = TWO_ROLES
    nodes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    colocated: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    meets: Mapping[str, Meeting] = field(default_factory=dict)
    local: bool = False
    producers_per_rank: int = 1
    pipelines: Mapping[str, StageSchedule] = field(default_factory=dict)
    slices: Mapping[str, int] = field(default_factory=dict)
    searched: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    activation_bytes: float | None = None
    moving: tuple[str, ...] = ()

    @property
    def trunk(self) -> str:
        """The role that reads features and computes the loss."""
        return self.graph.trunk

    @property
    def producers(self) -> tuple[str, ...]:
        """The roles that encode."""
        return self.graph.producers

    @property
    def behind(self) -> tuple[str, ...]:
        """The roles that read rows of the trunk's outputs."""
        return self.graph.behind

    @property
    def pipeline(self) -> StageSchedule:
        """The stages of the trunk, and how they work."""
        return self.pipeline_of(self.trunk)

    @property
    def in_fixed_order(self) -> bool:
        """Ranks need each other in some pass, so that one of several roles takes turns in a fixed order."""
        return any_binds(self.meets)

    @property
    def some_only_encode(self) -> bool:
        """Some members that encode share their processes with the trunk, and others do not."""
        pairs = {role: self.colocated.get(role, ()) for role in self.producers}
        shared = sum(len({member for member, _ in of_role}) for of_role in pairs.values())
        return 0 < shared < sum(self.counts[role] for role in self.producers)

    def pipeline_of(self, role: str) -> StageSchedule:
        """The stages of a role, and how they work."""
        return self.pipelines.get(role, ONE_STAGE)

    def meeting(self, role: str) -> Meeting:
        """The ranks of a role that begin a pass together."""
        return self.meets.get(role, Meeting())
