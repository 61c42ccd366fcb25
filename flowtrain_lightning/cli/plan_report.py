"""How ``flowtrain plan`` prints: a table of plans, memory bars, the step in time, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from flowtrain_lightning.allocator import BACKBONE, ModuleDescription
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, Problems, joint_bytes
from flowtrain_lightning.allocator.planner import PLAN_KINDS
from flowtrain_lightning.cli.plan_bill import Bill
from flowtrain_lightning.cli.plan_choice import Choices, why_plan_cannot_run
from flowtrain_lightning.placement.text_table import counted, text_table

WIDTH = 60

PURPOSES = {
    "weights": "W",
    "gradients": "G",
    "states": "S",
    "activations": "A",
    "logits": "L",
    "features": "F",
    "overhead": "O",
    "forward": "f",
    "backward": "b",
    "exchange": "x",
    "bubble": "p",
    "stragglers": "t",
    "sharding": "s",
    "reduction": "r",
    "optimizer": "o",
    "offload": "h",
    "waiting": "w",
    "idle": ".",
}
"""Purpose of bytes or seconds -> its letter in a bar."""

LEGEND = {
    "exchange": "exchange among tensor and context ranks",
    "bubble": "pipeline bubble",
    "stragglers": "waiting for the slowest rank",
    "sharding": "gathering and casting weights, adding gradients up",
    "reduction": "reduction of gradients",
    "offload": "activations to the host's memory and back",
    "waiting": "waiting for the first features",
}


@dataclass(frozen=True)
class Phase:
    """A part of a role's step.

    Attributes:
        purpose: a field of `RoleTime`, ``"waiting"`` or ``"idle"``.
        start: seconds from the step's beginning.
        seconds: how long.
    """

    purpose: str
    start: float
    seconds: float


@dataclass(frozen=True)
class PlanReport:
    """What was planned, and for what.

    Attributes:
        choices: the plans.
        problems: role -> what was planned for.
        module: that is planned for.
        data: where lengths are from, in words.
        given: the plan of an allocation that was given, which is shown beside the recommended one.
        bill: what training on so many tokens takes and costs, if that was asked.
    """

    choices: Choices
    problems: Problems
    module: ModuleDescription
    data: str
    given: ModelledPlan | None = None
    bill: Bill | None = None

    @property
    def shown(self) -> ModelledPlan:
        """The plan whose parts are shown: the given one, or the recommended one."""
        return self.choices.recommended.chosen if self.given is None else self.given

    def text(self) -> str:
        """Everything, for a terminal."""
        parts = [self._heading(), text_table(*self.choices.recommended.rows()), self.verdict()]
        parts += [] if self.bill is None else [self.bill.text()]
        return "\n\n".join([*parts, self._layouts(), self._memory(), self._time()])

    def values(self) -> dict[str, Any]:
        """Everything, for JSON. Bytes, seconds and shares are plain numbers."""
        cluster, choice = self.problems[BACKBONE].cluster, self.choices.recommended
        plans = {plan.kind: plan for plan in choice.predictions}
        reason = why_plan_cannot_run(choice.chosen, self.problems)
        anyway = self.choices.anyway.chosen
        return {
            "model": self.module.name,
            "parameters": {role: half.parameters for role, half in self.module.roles.items()},
            "device": cluster.device.name,
            "devices": cluster.devices,
            "devices_per_node": cluster.per_node,
            "data": self.data,
            "recommended": choice.chosen.kind if reason is None else None,
            "best": choice.chosen.kind,
            "reason": choice.reason,
            "why_it_cannot_run": reason,
            "gain_of_separation": choice.gain_of_separation,
            "smallest_full_batch": self.smallest_full_batch(),
            "plans": {kind: self._plan_values(plans[kind]) if kind in plans else None for kind in PLAN_KINDS},
            "if_every_layout_ran": None if anyway is choice.chosen else self._plan_values(anyway),
            "given": None if self.given is None else self._plan_values(self.given),
            "bill": None if self.bill is None else self.bill.values(),
        }

    def verdict(self) -> str:
        """The recommendation with its reason, whether training runs it, and what to know of it."""
        choice, anyway = self.choices.recommended, self.choices.anyway.chosen
        plan = choice.chosen
        if (reason := why_plan_cannot_run(plan, self.problems)) is not None:
            lines = [f"None is recommended: training runs no plan that fits. The best one, {plan.name}, {reason}"]
        else:
            lines = [f"Recommended: {plan.name}, because {choice.reason}."]
        if reason is None and anyway.seconds * (1 + choice.margin) < plan.seconds:
            faster = 100 * (plan.seconds / anyway.seconds - 1)
            lines.append(
                f"Training does not run yet what is predicted to be {faster:.0f} % faster: {_in_words(anyway)}."
            )
        if (samples := self.smallest_full_batch()) is not None:
            load, devices = self.problems[BACKBONE].load, self.problems[BACKBONE].cluster.devices
            lines.append(
                f"The batch of {counted(round(load.items), 'sample')} is small for {devices:,} devices: "
                f"{samples:,} samples would give each of them a microbatch of {load.budget:,} tokens."
            )
        if self.given is not None:
            lines += self._verdict_on_given(self.given)
        return "\n".join(lines)

    def smallest_full_batch(self) -> int | None:
        """Samples of a step that give every device a full microbatch; None where the batch gives half of that."""
        load, devices = self.problems[BACKBONE].load, self.problems[BACKBONE].cluster.devices
        if load.tokens >= devices * load.budget / 2:
            return None
        return ceil(devices * load.budget / (load.tokens / load.items))

    def _verdict_on_given(self, given: ModelledPlan) -> list[str]:
        cluster, best = self.problems[BACKBONE].cluster, self.choices.recommended.chosen
        gain = given.seconds / best.seconds - 1
        margin = self.choices.recommended.margin
        apart = f"{100 * gain:.0f} % more than" if gain > margin else "as far as can be told no more than"
        lines = [f"{_time_of_given(given)}, {apart} the recommended plan."]
        if (over := given.peak_bytes / usable_bytes(cluster)) > 1:
            lines.append(
                f"It needs {100 * (over - 1):.1f} % more memory than can be planned for on {cluster.device.name}."
            )
        if (reason := why_plan_cannot_run(given, self.problems)) is not None:
            lines.append(f"Training does not run it yet: it {reason}")
        return lines

    def _plan_values(self, plan: ModelledPlan) -> dict[str, Any]:
        roles = {}
        for role, candidate in plan.chosen.items():
            details, layout = candidate.details(self.problems[role]), candidate.layout
            also = {"expert": layout.expert, "shard": layout.shard, "replicas": layout.replicas}
            roles[role] = {
                "layout": {**layout.degrees, **also},
                "recompute": candidate.recompute,
                "offload": candidate.offload,
                "seconds": details.time.at(0),
                "microbatches": int(details.time.microbatches[0]),
                "bytes": details.memory.at(0),
            }
        return {
            "devices": plan.devices,
            "step_seconds": plan.seconds,
            "step_seconds_band": [plan.seconds_low, plan.seconds_high],
            "runs": why_plan_cannot_run(plan, self.problems) is None,
            "waiting_seconds": plan.waiting,
            "samples_per_second": plan.samples_per_second,
            "mfu": plan.mfu,
            "peak_bytes": plan.peak_bytes,
            "roles": roles,
        }

    def _heading(self) -> str:
        problem = self.problems[BACKBONE]
        cluster, load = problem.cluster, problem.load
        sizes = ", ".join(f"{role} {_billions(half.parameters)}" for role, half in self.module.roles.items())
        tokens = ", ".join(f"{one.load.tokens:,.0f} of the {role}" for role, one in self.problems.items())
        return (
            f"{self.module.name} ({sizes}) on {cluster.devices} {cluster.device.name}, {cluster.per_node} a node\n"
            f"a step: {counted(round(load.items), 'sample')} with tokens {tokens}; data: {self.data}"
        )

    def _layouts(self) -> str:
        plan = self.shown
        lines = [
            f"  {role:<{_longest(plan)}}  {candidate.layout.describe()}; {counted(candidate.devices, 'device')}; "
            f"recompute {candidate.recompute}"
            + ("" if candidate.offload == "none" else f"; offload {candidate.offload}")
            for role, candidate in plan.chosen.items()
        ]
        return "\n".join([f"Layouts ({plan.name})", *lines])

    def _memory(self) -> str:
        plan, limit = self.shown, usable_bytes(self.problems[BACKBONE].cluster)
        lines = [f"Memory of a device, GB (a bar is the {limit / 1e9:.1f} that can be planned for)"]
        total: dict[str, float] = {}
        for role, candidate in plan.chosen.items():
            use = candidate.details(self.problems[role]).memory.at(0)
            total[role] = sum(use.values())
            lines.append(_line(plan, role, bar(use, limit), use, 1e9))
        if plan.kind != "separate":
            lines.append(f"  {'together':<{_longest(plan)}}  {joint_bytes(self.problems, total) / 1e9:.1f}")
        return "\n".join(lines)

    def _time(self) -> str:
        plan = self.shown
        lines = [f"Step, s (a bar is {plan.seconds:.3f} s)"]
        used = set()
        for role, phases in step_phases(plan, self.problems).items():
            before = {"idle": phases[0].start} if phases[0].start else {}
            shown = {phase.purpose: phase.seconds for phase in phases}
            used |= set(shown)
            lines.append(_line(plan, role, bar({**before, **shown}, plan.seconds), shown, 1.0))
        legend = [f"{PURPOSES[name]} {meaning}" for name, meaning in LEGEND.items() if name in used]
        return "\n".join([*lines, *([f"  {'; '.join(legend)}"] if legend else [])])


def step_phases(plan: ModelledPlan, problems: Problems) -> dict[str, list[Phase]]:
    """Role -> its phases in a step, as if each kind of work were done in one piece.

    Roles on devices of their own run side by side; the backbone begins when the first features are there. Roles on the
    same devices follow one another. In a mixed plan encoders are shown on the devices that do nothing else, and the
    time before the backbone's work is when its devices encode.
    """
    found, clock = {}, 0.0
    for role, candidate in plan.chosen.items():
        parts = list(candidate.details(problems[role]).time.at(0).items())
        idle = max(0.0, plan.seconds - candidate.seconds)
        if plan.kind == "separate":
            first = min(plan.waiting, idle) if role == BACKBONE else 0.0
            found[role] = _phases([("waiting", first), *parts, ("idle", idle - first)], 0.0)
        elif plan.kind == "mixed" and role == BACKBONE:
            found[role] = _phases(parts, idle)
        else:
            share = candidate.seconds
            if plan.kind == "mixed":
                share *= plan.seconds / sum(one.seconds for name, one in plan.chosen.items() if name != BACKBONE)
            found[role] = _phases([(name, part * share / candidate.seconds) for name, part in parts], clock)
            clock += share
    return found


def _phases(parts: list[tuple[str, float]], start: float) -> list[Phase]:
    phases = []
    for purpose, seconds in parts:
        if seconds > 0:
            phases.append(Phase(purpose, start, seconds))
        start += seconds
    return phases


def bar(parts: Mapping[str, float], whole: float) -> str:
    """Parts of a whole as letters, `WIDTH` of them for all."""
    letters, end = "", 0.0
    for purpose, amount in parts.items():
        end += amount
        letters += PURPOSES[purpose] * max(0, round(WIDTH * end / whole) - len(letters))
    return letters.ljust(WIDTH)


def given_in_words(plan: ModelledPlan, problems: Problems) -> str:
    """What a given layout takes, as sentences, where there is no plan to show it beside."""
    limit = usable_bytes(problems[BACKBONE].cluster) / 1e9
    return f"{_time_of_given(plan)}, and {plan.peak_bytes / 1e9:.1f} GB of the {limit:.1f} that can be planned for."


def _time_of_given(plan: ModelledPlan) -> str:
    return f"Yours ({plan.name}): {plan.seconds:.4g} s a step ({plan.seconds_low:.3g} to {plan.seconds_high:.3g})"


def _in_words(plan: ModelledPlan) -> str:
    layouts = (f"{role} {one.layout.describe()}" for role, one in plan.chosen.items())
    return f"{plan.name} with {'; '.join(layouts)}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"


def _line(plan: ModelledPlan, role: str, text: str, parts: Mapping[str, float], unit: float) -> str:
    shown = "  ".join(f"{name} {amount / unit:.3g}" for name, amount in parts.items() if amount / unit >= 5e-4)
    return f"  {role:<{_longest(plan)}}  |{text}|  {shown}"


def _longest(plan: ModelledPlan) -> int:
    return max(len("together"), *map(len, plan.chosen))
