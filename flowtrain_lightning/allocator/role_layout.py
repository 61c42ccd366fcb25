"""In which layout the ranks of a role hold and share its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flowtrain_lightning.packing.setting_values import check_settings
from flowtrain_lightning.packing.stage_schedule import Cut, Schedule, StageSchedule
from flowtrain_lightning.packing.step_graph import Meeting

Sharding = Literal["replicate", "zero1", "zero2", "zero3", "fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
"""The part that a data-parallel rank keeps of the weights, gradients and optimizer states.

``"replicate"`` keeps all, ``"zero1"`` its share of the states, ``"zero2"`` its share of states and gradients,
``"zero3"`` and ``"fsdp"`` (FSDP2) its share of everything. Those of ZeRO are for plans of any system; ``"deepspeed-1"``
to ``"deepspeed-3"`` are the same by DeepSpeed.
"""

Recompute = Literal["none", "selective", "full"]
"""Recomputed in the backward: nothing, all but matrix products, or every layer."""

Offload = Literal["none", "weights", "optimizer", "activations", "all"]
"""The part of a role that lies in host memory while a device does not compute with it.

``"weights"`` are shards of weights, gradients and optimizer states (FSDP2), ``"optimizer"`` its states alone
(DeepSpeed), ``"activations"`` what a forward keeps for its backward, and ``"all"`` is weights and activations.
"""


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
        pipeline: stages, whose ranks each hold some of the layers.
        context: ranks that share every sequence.
        shard: how the data-parallel ranks hold the weights.
        replicas: groups into which the data-parallel ranks are divided, neighbours together. Weights are sharded
            within a group, and every group holds all of them (HSDP); 1 shards over all.
        expert: neighbouring data ranks among which the experts of a mixture are divided, see `expert_ranks`.
        virtual: runs of layers that each stage of a pipeline holds, interleaved with those of the others.
        schedule: in which order the stages of a pipeline work; ``"zb-h1"`` and ``"zb-v"`` make the gradients of
            weights when a stage would wait. With ``"zb-v"`` each holds two runs of layers, the first one both ends.
        cut: how layers are divided among the stages: by the time they take, or by their number.

    Raises:
        AllocationError: a degree below 1, an unknown ``shard``, ``schedule`` or ``cut``, or groups of unequal size.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: Sharding = "replicate"
    replicas: int = 1
    expert: int = 1
    virtual: int = 1
    schedule: Schedule = "1f1b"
    cut: Cut = "time"

    def __post_init__(self) -> None:
        for name, degree in {**self.degrees, "expert": self.expert, "virtual": self.virtual}.items():
            if degree < 1:
                raise AllocationError(f"The {name} degree of a layout is {degree}; it must be at least 1.")
        if self.virtual > 1 and self.pipeline == 1:
            raise AllocationError(
                f"A layout has virtual {self.virtual}, but pipeline 1: the stages of a pipeline hold several runs of "
                "layers each. Set pipeline to 2 or more, or leave virtual out."
            )
        self._refuse_bad_schedule()
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
        if self.replicas > 1 and self.data // self.replicas % self.expert:
            raise AllocationError(
                f"A layout has {self.data} data ranks in {self.replicas} replicas, and {self.expert} ranks that divide "
                f"experts; the expert degree must divide the {self.data // self.replicas} ranks of a replica."
            )

    def _refuse_bad_schedule(self) -> None:
        if self.schedule not in get_args(Schedule):
            known = ", ".join(repr(name) for name in get_args(Schedule))
            raise AllocationError(f"A layout cannot have the schedule {self.schedule!r}; known are {known}.")
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise AllocationError(
                f"A layout has the schedule {self.schedule!r}, but pipeline 1: it is an order of stages. Set pipeline "
                "to 2 or more, or leave schedule out."
            )
        if self.schedule != "1f1b" and self.virtual > 1:
            raise AllocationError(
                f"A layout has the schedule {self.schedule!r} and virtual {self.virtual}: runs of layers are "
                "interleaved in 1F1B only. Leave one of them out; 'zb-v' gives each stage two runs by itself."
            )
        if self.cut not in get_args(Cut) or (self.cut != "time" and self.pipeline == 1):
            raise AllocationError(
                f"A layout has the cut {self.cut!r} and pipeline {self.pipeline}: layers are cut into the stages of a "
                "pipeline by 'time' or by 'number'. Set pipeline to 2 or more, or leave cut out."
            )

    @property
    def stages(self) -> StageSchedule:
        """The stages of its pipeline, and how they work."""
        return StageSchedule(self.pipeline, 2 if self.schedule == "zb-v" else self.virtual, self.schedule, self.cut)

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
    def ranks_of_stage(self) -> int:
        """Those of one data-parallel member that hold the same layers."""
        return self.tensor * self.context

    @property
    def ranks_of_shard_group(self) -> int:
        """Ranks that need each other to compute, and so must work in one order; others may hold copies of the same."""
        return self.ranks_of_stage * (self.meets.members if self.meets_in_forwards else 1)

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the experts of a mixture are divided: neighbouring data ranks, with all tensor ranks."""
        return self.expert * self.tensor

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
    def meets(self) -> Meeting:
        """The ranks that need each other in a pass: to gather weights, to trade rows with experts, to sum gradients."""
        if self.gathers_weights:
            return Meeting(self.ranks_of_stage, self.data // self.replicas, ("forward", "backward"))
        if self.expert > 1:
            return Meeting(self.ranks_of_stage, self.expert, ("forward", "backward"))
        if self.shard == "deepspeed-2":
            return Meeting(self.ranks_of_stage, self.data, ("backward",))
        return Meeting(self.ranks_of_stage)

    @property
    def meets_in_forwards(self) -> bool:
        """Data-parallel members need each other in a forward: for weights, or for experts."""
        return "forward" in self.meets.passes

    @property
    def shares_weights(self) -> bool:
        """A rank needs others to compute a layer, so that they must work in one order."""
        return self.gathers_weights or self.ranks_of_stage > 1 or self.expert > 1

    @property
    def divides_weights(self) -> bool:
        """A rank holds a part only of the role's weights."""
        return self.shares_weights or self.pipeline > 1

    @property
    def is_whole_copies(self) -> bool:
        """Every rank holds all weights of the role, and works on samples of its own."""
        return self == Layout(data=self.data)

    def describe(self) -> str:
        """The layout in a few words, for the log: degrees of 1 are left out, but for ``data``."""
        degrees = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1 or name == "data"]
        replicas = [f"{self.replicas} replicas"] if self.replicas > 1 else []
        experts = [f"expert {self.expert}"] if self.expert > 1 else []
        virtual = [f"virtual {self.virtual}"] if self.virtual > 1 else []
        schedule = [self.schedule] if self.schedule != "1f1b" else []
        cut = [f"cut by {self.cut}"] if self.cut != "time" else []
        return ", ".join([*degrees, *virtual, *schedule, *cut, *experts, self.shard, *replicas])


@dataclass(frozen=True)
class RoleLayout:
    """A user's wish for a role's layout, where the number of its ranks follows from the run.

    Attributes:
        shard: how the ranks hold the weights, see `Layout`.
        replicas: groups of ranks that each hold all weights, see `Layout`.
        recompute: what a backward computes again.
        tensor: ranks that share every layer, see `Layout`.
        pipeline: stages, each of some of the layers, see `Layout`.
        context: ranks that share every sequence, see `Layout`.
        expert: data ranks among which a mixture's experts are divided, see `Layout`.
        virtual: runs of layers of each stage, see `Layout`.
        schedule: in which order stages work, see `Layout`.
        cut: how layers are divided among stages, see `Layout`.
        offload: what lies in host memory; weights only where they are sharded by FSDP2, the optimizer's states alone
            only with DeepSpeed.

    Raises:
        AllocationError: one of them is impossible.
    """

    shard: Sharding = "replicate"
    replicas: int = 1
    recompute: Recompute = "none"
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual: int = 1
    schedule: Schedule = "1f1b"
    cut: Cut = "time"
    offload: Offload = "none"

    def __post_init__(self) -> None:
        least = dict.fromkeys(("replicas", "tensor", "pipeline", "context", "expert", "virtual"), 1)
        check_settings(self, least=least, error=AllocationError)

    def over(self, ranks: int) -> Layout:
        """The layout of so many ranks.

        Raises:
            AllocationError: they cannot be divided so.
        """
        together = self.tensor * self.pipeline * self.context
        if together < 1 or ranks % together:
            pipeline = f" x pipeline {self.pipeline}" if self.pipeline > 1 else ""
            raise AllocationError(
                f"{count_ranks(ranks)} cannot be divided into groups of tensor {self.tensor}{pipeline} x context "
                f"{self.context}; the product must divide the number of ranks."
            )
        return Layout(
            ranks // together,
            self.tensor,
            self.pipeline,
            context=self.context,
            shard=self.shard,
            replicas=self.replicas,
            expert=self.expert,
            virtual=self.virtual,
            schedule=self.schedule,
            cut=self.cut,
        )


def count_ranks(count: int) -> str:
    """A number of ranks in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def number_spans(numbers: tuple[int, ...]) -> str:
    """Ascending numbers as text: neighbours are joined, as in ``0-5, 8-13``."""
    known = set(numbers)
    first = [number for number in numbers if number - 1 not in known]
    last = [number for number in numbers if number + 1 not in known]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def in_spans(ranks: tuple[int, ...]) -> str:
    """Ascending ranks in words, as in ``rank 3`` and ``ranks 0-5, 8-13``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {number_spans(ranks)}"
