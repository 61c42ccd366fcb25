"""Cells of `long_samples.py`: steps of few long samples, our plan for them, and what others would run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.emulated_records import emulated_data, sizes_of_records, write_records
from benchmarks.layout_plans import PER_NODE
from flowtrain_lightning.allocator import (
    BACKBONE,
    ENCODER,
    Allocation,
    Cluster,
    ModelledCosts,
    SearchSpace,
    Workload,
    named_device,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.allocator.workload import ENCODER_BATCHES_IN_FLIGHT
from flowtrain_lightning.cli.plan_choice import choose_plans, running_plans
from flowtrain_lightning.packing import IntArray, SampleSizes
from flowtrain_lightning.packing.step_work import PassTimes
from flowtrain_lightning.placement.drawn_steps import DrawnSteps, FilledSteps, steps_of
from flowtrain_lightning.placement.layout_costs import LayoutCosts, ModelledLayoutCosts
from flowtrain_lightning.placement.simulated_plans import PlanSimulator
from flowtrain_lightning.placement.simulation import simulate

OURS, ONE_LAYOUT, REPEATED, SLICED = "flowtrain plan", "one layout", "tower repeated", "tower sliced"

CONTENDERS = (OURS, ONE_LAYOUT, REPEATED, SLICED)
"""What is compared: the plan that is recommended; one layout of tensor ranks and shards for both halves; ranks that
share sequences and each encode all media of theirs; ranks that share the tower's tokens as well, as they do the
backbone's."""

DEVICE = "h100"
MOMENT = (16, 32)
"""Rows of features along the sides of a clip's moment, which is a media item: 2,048 patches."""

STEPS = 4
_RECORDS = 4 * STEPS
_OF_CLIPS = 7 / 8  # of the tokens
_TEMPLATE_ROOM = 64  # tokens, and a few for each media item
_CONTEXTS = (2, 4, 8)
_RUN = SearchSpace(pipeline=(1,), context=(1,), shard=("replicate", "fsdp"))


@dataclass(frozen=True)
class LongCell:
    """What is compared in one line.

    Attributes:
        model: a name of `named_model`.
        tokens: about so many has each sample; seven eighths of them are of clips.
        ranks: processes, each of which stands for one device.
        frozen: the tower does not train.
    """

    model: str
    tokens: int
    ranks: int
    frozen: bool

    @property
    def name(self) -> str:
        """In a few words."""
        return f"{self.model}, {self.tokens // 1024}K, {self.ranks} ranks, {'frozen' if self.frozen else 'trained'}"

    @property
    def samples(self) -> int:
        """Of a step: one for every four ranks."""
        return self.ranks // 4

    def records(self, folder: Path) -> Path:
        """The folder with the records, which are written where they are not yet."""
        own = folder / str(self.tokens)
        if not own.exists():
            rows = MOMENT[0] * MOMENT[1]
            moments = int(self.tokens * _OF_CLIPS) // rows
            words = self.tokens - moments * (rows + 4) - _TEMPLATE_ROOM
            pictures = {moments: 1.0}
            write_records(own, _RECORDS, sides=np.array([MOMENT] * 8), pictures=pictures, words=(words, words + 1))
        return own

    def question(self, folder: Path) -> LongQuestion:
        """What is planned for, with the records' own sizes.

        Args:
            folder: that of `records`.
        """
        data = emulated_data(folder, self.samples, self.tokens)
        sizes = sizes_of_records(data)
        module = named_model(self.model)
        module = module.with_frozen("encoder") if self.frozen else module
        media = dict.fromkeys(module.encoders, sizes.media_patches)
        workload = Workload(sizes.tokens, media, self.samples, self.tokens)
        cluster = Cluster(named_device(DEVICE), self.ranks, PER_NODE)
        return LongQuestion(role_problems(module, workload, cluster), workload, sizes)


@dataclass(frozen=True)
class SharedTower:
    """Costs of a tower that ranks which share sequences run together on all media of theirs, see `LayoutCosts`.

    Media items of a step are alike, so each of these ranks encodes a like part of them here. Its batches take what all
    of the group's take in their stead.

    Attributes:
        costs: of the layouts, in which the tower may share its tokens among the ranks.
        group: ranks that share a sequence.
    """

    costs: LayoutCosts
    group: int

    @property
    def encoder_trains(self) -> bool:
        """Encoder batches have backwards."""
        return self.costs.encoder_trains

    def batch(self, role: str, lengths: IntArray) -> PassTimes:
        """Seconds of forward and of backward of a batch."""
        return self.costs.batch(role, np.tile(lengths, self.group) if role == ENCODER else lengths)

    def end_of_step(self, role: str) -> tuple[float, float]:
        """Seconds of the reduction of gradients, and of the optimizer."""
        return self.costs.end_of_step(role)

    def on_the_way(self, role: str, lengths: IntArray) -> float:
        """Seconds until hidden states are with the next stage."""
        return self.costs.on_the_way(role, lengths)


@dataclass(frozen=True)
class Contender:
    """One of `CONTENDERS`.

    Attributes:
        plan: its layouts.
        costs: in these.
        simulated: seconds of a step, if nothing took time but that.
    """

    plan: ModelledPlan
    costs: LayoutCosts
    simulated: float

    @property
    def allocation(self) -> Allocation:
        """The plan on ranks."""
        return self.plan.allocation(PER_NODE)


@dataclass(frozen=True)
class LongQuestion:
    """What is planned for in a cell.

    Attributes:
        problems: role -> what is known of it.
        workload: of the records.
        sizes: of the records.
    """

    problems: Problems
    workload: Workload
    sizes: SampleSizes

    @cached_property
    def steps(self) -> DrawnSteps | FilledSteps:
        """Steps of these records; all take the same."""
        return steps_of(self.workload, self.sizes, count=2)

    def contenders(self) -> Mapping[str, Contender]:
        """All that are compared, each in its fastest layout; without those that have none."""
        simulator = PlanSimulator(self.problems, self.steps)
        ours = choose_plans(ModelledCosts(self.problems), simulator).recommended.chosen
        found = {OURS: self._contender(ours)}
        plain = next(
            (each for each in running_plans(ModelledCosts(self.problems, _RUN)) if each.kind == "uniform"), None
        )
        if plain is not None:
            found[ONE_LAYOUT] = self._contender(plain)
        for name in (REPEATED, SLICED):
            shared = [self._contender(plan, name) for plan in self._sharing_sequences()]
            if shared:
                found[name] = min(shared, key=lambda each: each.simulated)
        return found

    def _sharing_sequences(self) -> Iterator[ModelledPlan]:
        """The best plan of every context degree in which all ranks do both."""
        for degree in _CONTEXTS:
            space = replace(_RUN, tensor=(1,), context=(degree,))
            plans = running_plans(ModelledCosts(self.problems, space))
            yield from (plan for plan in plans if plan.kind == "colocated")

    def _contender(self, plan: ModelledPlan, tower: str | None = None) -> Contender:
        """A plan in its own costs, or with a tower of these kinds."""
        allocation, problems = plan.allocation(PER_NODE), self.problems
        group, costed = allocation.layouts[BACKBONE].context, allocation
        if tower == SLICED:  # tokens of an encoder are shared in no run, so that it is costed as a backbone
            layout = allocation.layouts[ENCODER]
            layout = replace(layout, data=layout.data // group, context=group)
            costed = replace(allocation, layouts={**allocation.layouts, ENCODER: layout})
            problems = Problems({**problems, ENCODER: replace(problems[ENCODER], role=BACKBONE)})
        costs: LayoutCosts = ModelledLayoutCosts(problems, costed)
        if tower is not None:
            costs = SharedTower(costs, group)
        seconds = simulate(self.steps.packed(allocation), allocation, costs, ENCODER_BATCHES_IN_FLIGHT).step_seconds
        return Contender(plan, costs, seconds)
