"""An allocation: the ranks of each role and their layout, which every planner answers with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any, Literal, get_args

from flowtrain_lightning.allocator.role_layout import AllocationError, Layout, Offload, Recompute, RoleLayout, in_spans
from flowtrain_lightning.packing.role_graph import Edge, RoleError, RoleGraph, graph_of
from flowtrain_lightning.packing.stage_entries import part_names
from flowtrain_lightning.packing.step_graph import Meeting
from flowtrain_lightning.packing.step_members import StepMembers

Placement = Literal["separate", "colocated", "mixed"]
"""``"separate"`` gives every rank one role, ``"colocated"`` gives every rank all of them, ``"mixed"`` gives every rank
the encoders and some the trunk too."""

Order = Literal["rules", "searched"]
"""``"rules"`` lets rules of each role decide in which order its works come, such as 1F1B of stages; ``"searched"``
searches one order of all works of a step, from its plan and the data module's cost models."""


@dataclass(frozen=True)
class Allocation:
    """A layout and ranks for every role: a trunk, such as the backbone, and at least one role that it reads.

    Attributes:
        placement: whether roles share ranks.
        layouts: role -> its layout.
        ranks: role -> its global ranks, ascending. Together the roles use the ranks from 0 on without a gap, and
            rank 0 has the trunk, since loggers and the progress bar live there.
        recompute: role -> what its backward computes again, as a plan assumes it; ``"none"`` for absent roles.
        offload: role -> what of it lies in host memory; ``"none"`` for absent roles.
        edges: what flows between the roles. None follows from their names, or else from the module that trains.
        order: what decides in which order ranks work.
        activation_bytes: of activations that a rank may keep for backwards, in a searched order. What finds no room is
            computed again, or moved to host memory where its role offloads activations, each batch by itself.
        encoder_activations: encoder batches whose activations a rank keeps, as a plan counts on; None is as the run
            says.

    Raises:
        AllocationError: a role is missing, or ranks contradict the placement or each other.
    """

    placement: Placement
    layouts: Mapping[str, Layout]
    ranks: Mapping[str, tuple[int, ...]]
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    offload: Mapping[str, Offload] = field(default_factory=dict)
    edges: tuple[Edge, ...] | None = None
    order: Order = "rules"
    activation_bytes: float | None = None
    encoder_activations: int | None = None

    def __post_init__(self) -> None:
        refuse_unknown_placement(self.placement, get_args(Placement))
        if set(self.ranks) != set(self.layouts):
            raise AllocationError(
                f"An allocation needs ranks for {_names(self.layouts)}, but has them for {_names(self.ranks)}."
            )
        if len(self.layouts) < 2:
            raise AllocationError(
                f"An allocation needs a role that encodes and one that reads features, such as 'encoder' and "
                f"'backbone', but has {_names(self.layouts)}."
            )
        if self.edges is not None and set(self.graph.roles) != set(self.layouts):
            raise AllocationError(f"The edges lead {self.graph}, but the roles are {_names(self.layouts)}.")
        for role in self.layouts:
            self._refuse_bad_ranks(role)
        self._refuse_bad_sharing()
        self._refuse_bad_recompute()
        self._refuse_bad_offload()
        self._refuse_bad_order()
        if (kept := self.encoder_activations) is not None and kept < 1:
            raise AllocationError(f"encoder_activations is {kept}; it must be at least 1.")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(set().union(*self.ranks.values()))

    @cached_property
    def graph(self) -> RoleGraph:
        """The edges between the roles.

        Raises:
            AllocationError: no edges are given, and the names of the roles do not say it.
        """
        try:
            return graph_of(self.layouts) if self.edges is None else RoleGraph(self.edges)
        except RoleError as error:
            raise AllocationError(str(error)) from error

    @property
    def is_bound(self) -> bool:
        """It is known what flows between the roles."""
        try:
            return bool(self.graph.edges)
        except AllocationError:
            return False

    def bound(self, graph: RoleGraph) -> Allocation:
        """The same allocation for a module in which rows flow so.

        Raises:
            AllocationError: it has other roles, or says itself that other rows flow.
        """
        if self.is_bound and self.graph == graph:
            return self
        if self.edges is not None and set(self.edges) != set(graph.edges):
            raise AllocationError(f"The edges of the allocation lead {self.graph}, but those of the module {graph}.")
        return replace(self, edges=graph.edges)

    @property
    def trunk(self) -> str:
        """The role that reads what the others make, and computes the loss."""
        return self.graph.trunk

    @property
    def producers(self) -> tuple[str, ...]:
        """The roles that encode."""
        return self.graph.producers

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, in the order in which data flow through them."""
        return self.graph.roles

    def own_members(self, rank: int) -> dict[str, int]:
        """Role of global ``rank`` -> the data-parallel member to which it belongs, the trunk first."""
        places = {role: self.member_of(role, rank) for role in (self.trunk, *self.graph.behind, *self.producers)}
        return {role: member for role, member in places.items() if member is not None}

    def step_members(self, nodes: int = 1) -> StepMembers:
        """The members of all roles, where the ranks lie on ``nodes`` alike, of as many each."""
        of_node, works = self.size // nodes, Counter(chain(*(self.ranks[role] for role in self.producers)))
        shared: dict[str, list[tuple[int, int]]] = {}
        for rank in self.ranks[self.trunk]:
            own = self.own_members(rank)
            for role in own.keys() - {self.trunk}:
                shared.setdefault(role, []).append((own[role], own[self.trunk]))
        node_of = {role: tuple(ranks[0] // of_node for ranks in self.members(role)) for role in self.roles}
        return StepMembers(
            {role: self.layouts[role].data for role in self.roles},
            self.graph,
            nodes=node_of if nodes > 1 else {},
            colocated={role: tuple(pairs) for role, pairs in shared.items()},
            meets=self.meets,
            producers_per_rank=max(works.values()),
            pipelines={role: self.layouts[role].stages for role in self.roles if self.layouts[role].pipeline > 1},
            slices={role: self.layouts[role].context for role in self.roles if self.layouts[role].context > 1},
            searched=self._rank_of_each() if self.order == "searched" else {},
            activation_bytes=self.activation_bytes,
            moving=tuple(role for role in self.roles if self.offload.get(role) == "activations"),
        )

    def _rank_of_each(self) -> dict[str, tuple[int, ...]]:
        """Role, or stage of one -> the rank of each member, where each has one."""
        return {
            name: self.stage_ranks(role, stage)
            for role in (self.trunk, *self.producers)
            for stage, name in enumerate(part_names(role, self.layouts[role].stages))
        }

    @property
    def works_ahead(self) -> bool:
        """Ranks that only encode may begin later steps, if they do not train.

        Of ranks that need each other to encode and are of two kinds, one kind has no time for that; and stages would
        have to agree on how far they come.
        """
        layouts = [self.layouts[role] for role in self.producers]
        needs_others = self.placement == "mixed" and any(layout.shares_weights for layout in layouts)
        return not needs_others and all(layout.pipeline == 1 for layout in layouts)

    @property
    def meets(self) -> dict[str, Meeting]:
        """Role -> which of its ranks begin a pass together."""
        return {role: layout.meets for role, layout in self.layouts.items()}

    def shard_groups(self, role: str) -> tuple[tuple[int, ...], ...]:
        """The global ranks that need each other to compute with a half of ``role``, group by group."""
        ranks, size = self.ranks[role], self.layouts[role].ranks_of_shard_group
        return tuple(ranks[first : first + size] for first in range(0, len(ranks), size))

    def with_roles(self, roles: Mapping[str, RoleLayout]) -> Allocation:
        """These ranks, with what a user says of some roles.

        Raises:
            AllocationError: there is no such role, or its ranks cannot be divided so.
        """
        if unknown := sorted(set(roles) - set(self.layouts)):
            raise AllocationError(f"There is no role {unknown[0]!r}; the roles are {_names(self.layouts)}.")
        layouts = {role: wanted.over(len(self.ranks[role])) for role, wanted in roles.items()}
        recompute = {role: wanted.recompute for role, wanted in roles.items() if wanted.recompute != "none"}
        offload = {role: wanted.offload for role, wanted in roles.items() if wanted.offload != "none"}
        return replace(
            self,
            layouts={**self.layouts, **layouts},
            recompute={**self.recompute, **recompute},
            offload={**self.offload, **offload},
        )

    def members(self, role: str) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each data-parallel member of a role, which work on the same samples.

        Neighbours are together: of tensor ranks first, then of context ranks. Ranks of one stage come before those of
        the next.
        """
        stages = [self.members_in_stage(role, stage) for stage in range(self.layouts[role].pipeline)]
        return tuple(tuple(chain(*of_member)) for of_member in zip(*stages, strict=True))

    def members_in_stage(self, role: str, stage: int) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each data-parallel member of a role that hold the layers of one stage."""
        ranks, size = self.stage_ranks(role, stage), self.layouts[role].ranks_of_stage
        return tuple(ranks[first : first + size] for first in range(0, len(ranks), size))

    def stage_ranks(self, role: str, stage: int) -> tuple[int, ...]:
        """The global ranks that hold the layers of one stage of a role."""
        count = len(self.ranks[role]) // self.layouts[role].pipeline
        return self.ranks[role][stage * count : (stage + 1) * count]

    def stage_of(self, role: str, rank: int) -> int:
        """The stage of ``role`` whose layers global ``rank`` holds; 0 where it has no lane for the role."""
        within = self.rank_within(role, rank)
        return 0 if within is None else within * self.layouts[role].pipeline // len(self.ranks[role])

    def slice_of(self, role: str, rank: int) -> int:
        """Which of the context ranks of its member global ``rank`` is; 0 where it has no lane for the role."""
        within, layout = self.rank_within(role, rank) or 0, self.layouts[role]
        return within // layout.tensor % layout.context

    def member_of(self, role: str, rank: int) -> int | None:
        """The data-parallel member of ``role`` that global ``rank`` belongs to, or None where it has no lane for it."""
        within, layout = self.rank_within(role, rank), self.layouts[role]
        return None if within is None else within // layout.ranks_of_stage % layout.data

    def rank_within(self, role: str, rank: int) -> int | None:
        """The index of global ``rank`` among the ranks of ``role``, or None where it has no lane for that role."""
        return self._places[role].get(rank)

    @cached_property
    def _places(self) -> dict[str, dict[int, int]]:
        """Role -> global rank -> its index among the role's ranks."""
        return {role: {rank: place for place, rank in enumerate(ranks)} for role, ranks in self.ranks.items()}

    def describe(self) -> str:
        """The allocation in one line, for the log."""
        if self.order != "rules":
            kept = "" if (most := self.activation_bytes) is None else f", in {most:,.0f} bytes of activations"
            plain = replace(self, order="rules", activation_bytes=None)
            return f"{plain.describe()}; the order of works is {self.order}{kept}"
        if self.placement == "colocated" and all(layout.is_whole_copies for layout in self.layouts.values()):
            return f"colocated: {' and '.join(self.layouts)} on {in_spans(tuple(range(self.size)))}"
        roles = (f"{role} on {in_spans(self.ranks[role])} ({one.describe()})" for role, one in self.layouts.items())
        return f"{self.placement}: {'; '.join(roles)}"

    def state_dict(self) -> dict[str, Any]:
        """The allocation in JSON types."""
        state: dict[str, Any] = {
            "placement": self.placement,
            "layouts": {role: asdict(layout) for role, layout in self.layouts.items()},
            "ranks": {role: list(ranks) for role, ranks in self.ranks.items()},
            "recompute": dict(self.recompute),
            "offload": dict(self.offload),
        }
        if self.order != "rules":
            state["order"] = self.order
        limits = {name: getattr(self, name) for name in ("activation_bytes", "encoder_activations")}
        state |= {name: limit for name, limit in limits.items() if limit is not None}
        return state if self.edges is None else {**state, "edges": [list(edge) for edge in self.edges]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Allocation:
        """The allocation that `state_dict` gave."""
        layouts = {role: Layout(**degrees) for role, degrees in state["layouts"].items()}
        ranks = {role: tuple(numbers) for role, numbers in state["ranks"].items()}
        edges = None if "edges" not in state else tuple(Edge(*edge) for edge in state["edges"])
        more = state.get("order", "rules"), state.get("activation_bytes"), state.get("encoder_activations")
        return cls(state["placement"], layouts, ranks, state["recompute"], state["offload"], edges, *more)

    def _refuse_bad_ranks(self, role: str) -> None:
        ranks, layout = self.ranks[role], self.layouts[role]
        if list(ranks) != sorted(set(ranks)):
            raise AllocationError(f"The {role} ranks {list(ranks)} must be ascending, each named once.")
        if len(ranks) != layout.ranks:
            raise AllocationError(
                f"The {role} layout ({layout.describe()}) needs {layout.ranks} ranks, but the role has {len(ranks)}: "
                f"{list(ranks)}."
            )

    def _refuse_bad_sharing(self) -> None:
        everyone = sorted(set().union(*self.ranks.values()))
        for role, other in combinations(self.layouts, 2):
            shared = sorted({*self.ranks[role]} & {*self.ranks[other]})
            if self.placement == "separate" and shared:
                which = "both roles have" if len(self.ranks) == 2 else f"{role!r} and {other!r} both have"
                raise AllocationError(f"Separate roles share no rank, but {which} {in_spans(tuple(shared))}.")
            if self.placement == "colocated" and tuple(self.ranks[role]) != tuple(self.ranks[other]):
                raise AllocationError(
                    f"Colocated roles have the same ranks, but the {role} has {list(self.ranks[role])} and the {other} "
                    f"{list(self.ranks[other])}."
                )
        if everyone != list(range(len(everyone))):
            raise AllocationError(f"The ranks must run from 0 without a gap, but the roles use {everyone}.")
        if not self.is_bound:
            return
        for role in self.producers if self.placement == "mixed" else ():
            if list(self.ranks[role]) != everyone:
                raise AllocationError(
                    f"In a mixed allocation every rank encodes, but the {role} has {in_spans(self.ranks[role])}."
                )
        if 0 not in self.ranks[self.trunk]:
            raise AllocationError(f"Rank 0 must be a {self.trunk} rank, since loggers and the progress bar live there.")

    def _refuse_bad_recompute(self) -> None:
        for role, recompute in self.recompute.items():
            if role not in self.layouts:
                raise AllocationError(f"There is no role {role!r} to recompute; the roles are {_names(self.layouts)}.")
            if recompute not in get_args(Recompute):
                known = _names(get_args(Recompute))
                raise AllocationError(f"The {role} cannot recompute {recompute!r}; choose from {known}.")

    def _refuse_bad_order(self) -> None:
        if self.order not in get_args(Order):
            raise AllocationError(f"There is no order {self.order!r}; choose from {_names(get_args(Order))}.")
        for role, layout in self.layouts.items() if self.order == "searched" else ():
            if layout.ranks_of_stage > 1 or layout.meets.binds or layout.virtual > 1 or layout.schedule != "1f1b":
                raise AllocationError(
                    f"The order is 'searched', but the {role} has {layout.describe()}: an order is searched where no "
                    "rank needs another one inside of a pass. Give every role whole copies (shard 'replicate'), with a "
                    "pipeline if it is to have stages, or leave the order out."
                )
        if self.order == "searched" and self.is_bound and self.graph.behind:
            raise AllocationError(
                f"The order is 'searched', but a {self.graph.behind[0]} reads what the {self.trunk} makes, which the "
                "search does not know. Leave the order out."
            )
        self._refuse_bad_limit()

    def _refuse_bad_limit(self) -> None:
        if self.activation_bytes is None:
            return
        if not 0 < self.activation_bytes < float("inf"):
            raise AllocationError(f"activation_bytes is {self.activation_bytes}; give the bytes that a rank may keep.")
        if self.order != "searched":
            raise AllocationError("activation_bytes is for one order of all works; give order: searched beside it.")
        for role in (role for role, recompute in self.recompute.items() if recompute != "none"):
            raise AllocationError(
                f"The {role} recomputes in every batch, but with activation_bytes only those that find no room are "
                "computed again. Leave one of them out."
            )

    def _refuse_bad_offload(self) -> None:
        for role, offload in self.offload.items():
            if role not in self.layouts:
                raise AllocationError(f"There is no role {role!r} to offload; the roles are {_names(self.layouts)}.")
            if offload not in get_args(Offload):
                known = _names(get_args(Offload))
                raise AllocationError(f"The {role} cannot offload {offload!r}; choose from {known}.")
            if offload in ("weights", "all") and self.layouts[role].shard != "fsdp":
                raise AllocationError(
                    f"The {role} offloads {offload!r}, but only weights in shards of FSDP2 can lie in host memory, and "
                    f"its layout is {self.layouts[role].describe()}. Give it shard 'fsdp', or offload 'activations' "
                    "or, with DeepSpeed, 'optimizer'."
                )
            if offload == "optimizer" and not self.layouts[role].by_deepspeed:
                raise AllocationError(
                    f"The {role} offloads {offload!r}, but only where DeepSpeed runs a role do optimizer states alone "
                    f"lie in host memory, and its layout is {self.layouts[role].describe()}. Give it shard "
                    "'deepspeed-1', 'deepspeed-2' or 'deepspeed-3', or shard 'fsdp' and offload 'weights'."
                )
            recompute = self.recompute.get(role, "none")
            if offload in ("activations", "all") and recompute != "none":
                raise AllocationError(
                    f"The {role} offloads {offload!r} and recomputes {recompute!r}: activations are either kept in "
                    "host memory or computed again. Leave one of them out."
                )


def refuse_unknown_placement(placement: str, known: tuple[str, ...]) -> None:
    """Raise an AllocationError unless ``placement`` is a known one."""
    if placement not in known:
        raise AllocationError(f"There is no placement {placement!r}; choose from {_names(known)}.")


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
