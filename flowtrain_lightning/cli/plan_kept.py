"""Whether it pays to keep the features of frozen encoders: the best plan for steps that read them, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowtrain_lightning.allocator import BACKBONE, Layout, ModelledCosts
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.cli.plan_choice import can_run, running_plans
from flowtrain_lightning.cli.plan_words import candidate_in_words
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

_LEAST_GAIN = 1.02
"""How many times as fast steps must be for it to be worth a word."""


@dataclass(frozen=True)
class KeptPlan:
    """Steps from the second epoch on, where the features of frozen encoders are kept.

    Attributes:
        plan: in which all devices train the backbone; the encoders, which have nothing to do, are whole on each.
        seconds: of a step, if loaders read as fast.
        encoding_seconds: of a step that encodes, in the recommended plan.
        nbytes: of the features that a step reads.
        samples: of a step.
        nodes: that read them.
    """

    plan: ModelledPlan
    seconds: float
    encoding_seconds: float
    nbytes: float
    samples: float
    nodes: int

    @property
    def gain(self) -> float:
        """How many times as fast a step is."""
        return self.encoding_seconds / self.seconds

    def text(self) -> str:
        """The report's line."""
        wanted, least = (_size(self.nbytes / each / self.nodes) for each in (self.seconds, self.encoding_seconds))
        return (
            f"with keep_features {self.seconds:.3g} s a step from the second epoch on ({self.gain:.2f} times as fast): "
            f"all devices on the backbone ({candidate_in_words(self.plan.chosen[BACKBONE])}), the encoder whole on "
            f"each; each node reads {wanted}/s, and below {least}/s it loses; {_size(self.nbytes / self.samples)} a "
            "sample on disk"
        )

    def values(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "step_seconds": self.seconds,
            "gain": self.gain,
            "bytes_of_a_sample": self.nbytes / self.samples,
            "bytes_per_second": self.nbytes / self.seconds,
            "least_bytes_per_second": self.nbytes / self.encoding_seconds,
            "backbone": self.plan.chosen[BACKBONE].layout.degrees | {"shard": self.plan.chosen[BACKBONE].layout.shard},
        }


def kept_plan(recommended: ModelledPlan, costs: ModelledCosts, simulator: PlanSimulator | None) -> KeptPlan | None:
    """The best plan for a run that reads features; None where none can be kept, or none would be faster.

    Args:
        recommended: the plan that encodes.
        costs: of the same module on the same devices.
        simulator: of their steps; None where it plays no such module.
    """
    problems = costs.problems
    encoders = problems.encoders
    if simulator is None or not encoders or any(problems[role].half.trains for role in encoders):
        return None

    def allows(role: str, layout: Layout) -> bool:
        return can_run(role, layout, problems) and (role not in encoders or not layout.shares_weights)

    together = [plan for plan in running_plans(costs, allows) if plan.kind in ("uniform", "colocated")]
    best = min(together, key=lambda plan: plan.chosen[problems.trunk].seconds, default=None)
    seconds = None if best is None else simulator.seconds_reading(best)
    if best is None or seconds is None or recommended.seconds < _LEAST_GAIN * seconds:
        return None
    cluster = problems.cluster
    nodes = -(-cluster.devices // cluster.per_node)
    samples = problems.load.items
    return KeptPlan(best, seconds, recommended.seconds, _feature_bytes(problems), samples, nodes)


def _feature_bytes(problems: Problems) -> float:
    """Bytes of the features that the encoders make in a step."""
    found = 0.0
    for problem in map(problems.__getitem__, problems.encoders):
        width, per_token = problem.half.result
        found += problem.load.tokens * per_token * width * problem.precision.computing
    return found


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"
