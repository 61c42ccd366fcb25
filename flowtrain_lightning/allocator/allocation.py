"""Which ranks play which role, and in which layout: the answer of every planner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, get_args

ENCODER = "encoder"
"""The role that turns media into features."""

BACKBONE = "backbone"
"""The role that reads tokens and features, and computes the loss."""

ROLES = (ENCODER, BACKBONE)
"""The names of the roles, in the order in which data flow through them."""


def encoder_of(modality: str, roles: Collection[str]) -> str:
    """The role among these that encodes a modality: ``encoder`` where there is one, else ``encoder_<modality>``."""
    return ENCODER if ENCODER in roles else f"{ENCODER}_{modality}"


def modality_of(role: str) -> str | None:
    """The one modality that a role encodes; None of ``encoder``, which takes whatever there is, and the backbone."""
    encoder, _, modality = role.partition("_")
    return modality if encoder == ENCODER and modality else None


def lane_of(role: str) -> str:
    """What a rank with this role does: ``encoder`` or ``backbone``."""
    return BACKBONE if role == BACKBONE else ENCODER


Sharding = Literal["replicate", "zero1", "zero2", "zero3", "fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
"""What a data-parallel rank keeps of the weights, gradients and optimizer states.

``"replicate"`` keeps all, ``"zero1"`` its share of the states, ``"zero2"`` its share of states and gradients,
``"zero3"`` and ``"fsdp"`` (FSDP2) its share of everything. Those of ZeRO are for plans of any system; ``"deepspeed-1"``
to ``"deepspeed-3"`` are the same by DeepSpeed.
"""

Recompute = Literal["none", "selective", "full"]
"""What a backward computes again: nothing, what costs no matrix product, or every layer."""

Offload = Literal["none", "weights", "optimizer", "activations", "all"]
"""What of a role lies in host memory while a device does not compute with it.

``"weights"`` are shards of weights, gradients and optimizer states (FSDP2), ``"optimizer"`` its states alone
(DeepSpeed), ``"activations"`` what a forward keeps for its backward, and ``"all"`` is weights and activations.
"""

Placement = Literal["separate", "colocated", "mixed"]
"""``"separate"`` gives every rank one role, ``"colocated"`` gives every rank all of them, ``"mixed"`` gives every rank
the encoders and some the backbone too."""


class PlanningError(ValueError):
    """There is no plan for what was given; the message says why and what would do."""


class AllocationError(PlanningError):
    """The ranks cannot be divided among the roles in this way."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of one role and how its data-parallel ranks hold the weights.

    Attributes:
        data: copies of the role that work on different samples.
        tensor: ranks that share every layer.
        pipeline: ranks that each hold some of the layers.
        context: ranks that share every sequence.
        shard: how the data-parallel ranks hold the weights.
        replicas: groups into which the data-parallel ranks are divided, neighbours together. Weights are sharded
            within a group, and every group holds all of them (HSDP); 1 shards over all.
        expert: neighbouring data ranks among which the experts of a mixture are divided.

    Raises:
        AllocationError: a degree below 1, an unknown ``shard``, or groups of unequal size.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: Sharding = "replicate"
    replicas: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, degree in {**self.degrees, "expert": self.expert}.items():
            if degree < 1:
                raise AllocationError(f"The {name} degree of a layout is {degree}; it must be at least 1.")
        if self.shard not in get_args(Sharding):
            known = ", ".join(repr(name) for name in get_args(Sharding))
            raise AllocationError(f"A layout cannot shard by {self.shard!r}; known are {known}.")
        if self.replicas != 1 and self.shard not in ("fsdp", "zero3"):
            raise AllocationError(
                f"A layout has replicas {self.replicas}, but shard {self.shard!r}; only 'fsdp' and 'zero3' shard "
                "weights in several groups. Leave replicas out."
            )
        if self.replicas < 1 or self.data % self.replicas:
            raise AllocationError(
                f"A layout has {self.data} data ranks in {self.replicas} replicas; the number of replicas must divide "
                "that of data ranks."
            )

        if self.data % self.expert:
            raise AllocationError(
                f"A layout has {self.data} data ranks that divide experts among {self.expert} of them; the expert "
                "degree must divide that of data ranks."
            )

    @property
    def degrees(self) -> dict[str, int]:
        """All degrees by name."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}

    @property
    def ranks(self) -> int:
        """Ranks that the layout needs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def ranks_of_member(self) -> int:
        """Ranks of one data-parallel member: those that work on the same samples."""
        return self.ranks // self.data

    @property
    def ranks_of_shard_group(self) -> int:
        """Ranks that need each other to compute, and so must work in one order; others may hold copies of the same."""
        return self.ranks // self.replicas if self.gathers_weights else self.ranks_of_member

    @property
    def gathers_weights(self) -> bool:
        """Data-parallel members need each other to compute a layer, so that all must work in one order."""
        return self.shard in ("fsdp", "zero3", "deepspeed-3")

    @property
    def by_deepspeed(self) -> bool:
        """DeepSpeed runs the role."""
        return self.shard.startswith("deepspeed-")

    @property
    def most_kept_forwards(self) -> int | None:
        """Forwards of a rank that may wait for their backward at the same time; None is any number."""
        return 1 if self.shard == "deepspeed-3" else None

    @property
    def sums_in_step(self) -> bool:
        """Data-parallel members need each other in every backward, so that all must work in one order."""
        return self.gathers_weights or self.shard == "deepspeed-2"

    @property
    def shares_weights(self) -> bool:
        """A rank needs others to compute a layer, so that they must work in one order."""
        return self.gathers_weights or self.ranks_of_member > 1

    @property
    def is_whole_copies(self) -> bool:
        """Every rank holds all weights of the role, and works on samples of its own."""
        return self == Layout(data=self.data)

    def describe(self) -> str:
        """The layout in a few words, for the log: degrees of 1 are left out, but for ``data``."""
        degrees = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1 or name == "data"]
        replicas = [f"{self.replicas} replicas"] if self.replicas > 1 else []
        experts = [f"expert {self.expert}"] if self.expert > 1 else []
        return ", ".join([*degrees, *experts, self.shard, *replicas])


@dataclass(frozen=True)
class RoleLayout:
    """What a user says of a role's layout where the number of its ranks follows from the run.

    Attributes:
        shard: how the ranks hold the weights, see `Layout`.
        replicas: groups of ranks that each hold all weights, see `Layout`.
        recompute: what a backward computes again.
        tensor: ranks that share every layer, see `Layout`.
        context: ranks that share every sequence, see `Layout`.
        offload: what lies in host memory; weights only where they are sharded by FSDP2, the optimizer's states alone
            only with DeepSpeed.
    """

    shard: Sharding = "replicate"
    replicas: int = 1
    recompute: Recompute = "none"
    tensor: int = 1
    context: int = 1
    offload: Offload = "none"

    def over(self, ranks: int) -> Layout:
        """The layout of so many ranks.

        Raises:
            AllocationError: they cannot be divided so.
        """
        together = self.tensor * self.context
        if together < 1 or ranks % together:
            raise AllocationError(
                f"{count_ranks(ranks)} cannot be divided into groups of tensor {self.tensor} x context {self.context}; "
                "the product must divide the number of ranks."
            )
        return Layout(ranks // together, self.tensor, context=self.context, shard=self.shard, replicas=self.replicas)


@dataclass(frozen=True)
class Allocation:
    """A layout and ranks for every role: the backbone and at least one encoder.

    Attributes:
        placement: whether roles share ranks.
        layouts: role -> its layout.
        ranks: role -> its global ranks, ascending. Together the roles use the ranks from 0 on without a gap, and
            rank 0 is a backbone rank, since loggers and the progress bar live there.
        recompute: role -> what its backward computes again, as a plan assumes it; ``"none"`` for absent roles.
        offload: role -> what of it lies in host memory; ``"none"`` for absent roles.

    Raises:
        AllocationError: a role is missing, or ranks contradict the placement or each other.
    """

    placement: Placement
    layouts: Mapping[str, Layout]
    ranks: Mapping[str, tuple[int, ...]]
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    offload: Mapping[str, Offload] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unknown_placement(self.placement, get_args(Placement))
        for name, roles in (("layouts", self.layouts), ("ranks", self.ranks)):
            if BACKBONE not in roles or len(roles) < len(ROLES) or set(roles) != set(self.layouts):
                known = ROLES if name == "layouts" else tuple(self.layouts)
                raise AllocationError(
                    f"An allocation needs {name} for {_names(known)}, but has {_names(tuple(roles))}."
                )
        for role in self.layouts:
            self._refuse_bad_ranks(role)
        self._refuse_bad_sharing()
        self._refuse_bad_recompute()
        self._refuse_bad_offload()

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(set().union(*self.ranks.values()))

    @property
    def encoders(self) -> tuple[str, ...]:
        """The roles that encode."""
        return tuple(role for role in self.layouts if role != BACKBONE)

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, in the order in which data flow through them."""
        return (*self.encoders, BACKBONE)

    @property
    def encoder_members(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each data-parallel member that encodes: of one encoder after another."""
        return tuple(member for role in self.encoders for member in self.members(role))

    def encoder_member_of(self, rank: int) -> int | None:
        """Which of ``encoder_members`` global ``rank`` belongs to, or None where it does not encode."""
        first = 0
        for role in self.encoders:
            if (member := self.member_of(role, rank)) is not None:
                return first + member
            first += self.layouts[role].data
        return None

    @property
    def colocated_lanes(self) -> tuple[tuple[int, int], ...]:
        """Of each rank with both roles, ascending: which of ``encoder_members`` it is, and which of the backbone's."""
        lanes = ((self.encoder_member_of(rank), self.member_of(BACKBONE, rank)) for rank in self.ranks[BACKBONE])
        return tuple((encoder, backbone) for encoder, backbone in lanes if encoder is not None and backbone is not None)

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

        Neighbours are together: of tensor ranks first, then of context ranks.
        """
        ranks, size = self.ranks[role], self.layouts[role].ranks_of_member
        return tuple(ranks[first : first + size] for first in range(0, len(ranks), size))

    def member_of(self, role: str, rank: int) -> int | None:
        """The data-parallel member of ``role`` that global ``rank`` belongs to, or None where it has no lane for it."""
        within = self.rank_within(role, rank)
        return None if within is None else within // self.layouts[role].ranks_of_member

    def rank_within(self, role: str, rank: int) -> int | None:
        """The index of global ``rank`` among the ranks of ``role``, or None where it has no lane for that role."""
        ranks = self.ranks[role]
        return ranks.index(rank) if rank in ranks else None

    def describe(self) -> str:
        """The allocation in one line, for the log."""
        if self.placement == "colocated" and all(layout.is_whole_copies for layout in self.layouts.values()):
            return f"colocated: {' and '.join(self.layouts)} on {_spans(self.ranks[BACKBONE])}"
        roles = [f"{role} on {_spans(self.ranks[role])} ({layout.describe()})" for role, layout in self.layouts.items()]
        return f"{self.placement}: {'; '.join(roles)}"

    def state_dict(self) -> dict[str, Any]:
        """The allocation in JSON types."""
        return {
            "placement": self.placement,
            "layouts": {role: asdict(layout) for role, layout in self.layouts.items()},
            "ranks": {role: list(ranks) for role, ranks in self.ranks.items()},
            "recompute": dict(self.recompute),
            "offload": dict(self.offload),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Allocation:
        """The allocation that `state_dict` gave."""
        layouts = {role: Layout(**degrees) for role, degrees in state["layouts"].items()}
        ranks = {role: tuple(numbers) for role, numbers in state["ranks"].items()}
        return cls(state["placement"], layouts, ranks, state["recompute"], state["offload"])

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
                raise AllocationError(f"Separate roles share no rank, but {which} {_spans(tuple(shared))}.")
            if self.placement == "colocated" and tuple(self.ranks[role]) != tuple(self.ranks[other]):
                raise AllocationError(
                    f"Colocated roles have the same ranks, but the {role} has {list(self.ranks[role])} and the {other} "
                    f"{list(self.ranks[other])}."
                )
        if everyone != list(range(len(everyone))):
            raise AllocationError(f"The ranks must run from 0 without a gap, but the roles use {everyone}.")
        if self.placement == "mixed":
            for role in set(self.ranks) - {BACKBONE}:
                if list(self.ranks[role]) != everyone:
                    raise AllocationError(
                        f"In a mixed allocation every rank encodes, but the {role} has {_spans(self.ranks[role])}."
                    )
        if 0 not in self.ranks[BACKBONE]:
            raise AllocationError("Rank 0 must be a backbone rank, since loggers and the progress bar live there.")

    def _refuse_bad_recompute(self) -> None:
        for role, recompute in self.recompute.items():
            if role not in self.layouts:
                raise AllocationError(f"There is no role {role!r} to recompute; the roles are {_names(self.layouts)}.")
            if recompute not in get_args(Recompute):
                known = _names(get_args(Recompute))
                raise AllocationError(f"The {role} cannot recompute {recompute!r}; choose from {known}.")

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


def count_ranks(count: int) -> str:
    """A number of ranks in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def number_spans(numbers: tuple[int, ...]) -> str:
    """Ascending numbers as text: neighbours are joined, as in ``0-5, 8-13``."""
    known = set(numbers)
    first = [number for number in numbers if number - 1 not in known]
    last = [number for number in numbers if number + 1 not in known]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _spans(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {number_spans(ranks)}"
