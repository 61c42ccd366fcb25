"""The report of ``flowtrain plan``: hours and cost, the recommended plan in words, others beside it, what is next."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import ModuleDescription, Workload
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.allocator.digits import in_digits
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.planner import PLAN_KINDS
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.allocator.workload import ENCODER_BATCHES_IN_FLIGHT
from flowtrain_lightning.cli.plan_bars import bars_of
from flowtrain_lightning.cli.plan_bill import Bill
from flowtrain_lightning.cli.plan_choice import Choices, kinds_alike, why_plan_cannot_run
from flowtrain_lightning.cli.plan_kept import KeptPlan
from flowtrain_lightning.cli.plan_loading import cores_for_pictures, loading_in_words, loading_warning, workers_for
from flowtrain_lightning.cli.plan_words import candidate_in_words, next_command, placed_in_words, tokens_in_words
from flowtrain_lightning.placement.text_table import counted, text_table


@dataclass(frozen=True)
class PlanReport:
    """A question with its plans.

    Attributes:
        choices: the plans.
        problems: role -> what was planned for.
        module: that is planned for.
        data: where lengths are from, in words.
        workload: what is asked of a step.
        given: the plan of an allocation that was given, which is shown beside the recommended one.
        bill: what training on so many tokens takes and costs, if that was asked.
        file: where the recommended plan was written, if it was.
        kept: what it would gain to keep features; None: nothing.
    """

    choices: Choices
    problems: Problems
    module: ModuleDescription
    data: str
    workload: Workload
    given: ModelledPlan | None = None
    bill: Bill | None = None
    file: Path | None = None
    kept: KeptPlan | None = None

    @property
    def shown(self) -> ModelledPlan:
        """The plan whose parts are shown: the given one, or the recommended one."""
        return self.choices.recommended.chosen if self.given is None else self.given

    def text(self, verbose: bool = False) -> str:
        """Everything, for a terminal; ``verbose`` adds layouts as files have them, and bars of memory and time."""
        parts = [self._heading()]
        parts += [] if self.bill is None else [self.bill.text()]
        parts += [self.verdict(), self._shown_in_words(), self._table()]
        parts += [bars_of(self.shown, self.problems)] if verbose else []
        return "\n\n".join([*parts, *self._next()])

    def values(self) -> dict[str, Any]:
        """Everything, for JSON. Bytes, seconds and shares are plain numbers."""
        cluster, choice = self.problems.cluster, self.choices.recommended
        plans = {plan.kind: plan for plan in choice.predictions}
        reason, faster = why_plan_cannot_run(choice.chosen, self.problems), self.choices.faster
        return {
            "model": self.module.name,
            "parameters": {role: half.parameters for role, half in self.module.roles.items()},
            "device": cluster.device.name,
            "devices": cluster.devices,
            "devices_per_node": cluster.per_node,
            "data": self.data,
            "token_budget": self.problems.load.budget,
            "samples": round(self.problems.load.items),
            "encoder_activations": self.workload.encoder_activations,
            "recommended": choice.chosen.kind if reason is None else None,
            "best": choice.chosen.kind,
            "reason": choice.reason,
            "why_it_cannot_run": reason,
            "gain_of_separation": choice.gain_of_separation,
            "smallest_full_batch": smallest_full_batch(self.problems),
            "plans": {kind: self._plan_values(plans[kind]) if kind in plans else None for kind in PLAN_KINDS},
            "if_every_layout_ran": None if faster is None else self._plan_values(faster),
            "given": None if self.given is None else self._plan_values(self.given),
            "bill": None if self.bill is None else self.bill.values(),
            "kept_features": None if self.kept is None else self.kept.values(),
        }

    def verdict(self) -> str:
        """The recommendation with its reason, whether training runs it, and what to know of it."""
        choice, faster = self.choices.recommended, self.choices.faster
        plan = choice.chosen
        if (reason := why_plan_cannot_run(plan, self.problems)) is not None:
            lines = [f"None is recommended: training runs no plan that fits. The best one, {plan.name}, {reason}"]
        else:
            lines = [f"Recommended: {plan.name} ({placed_in_words(plan)}){self._because()}."]
        if faster is not None and faster.seconds * (1 + choice.margin) < plan.seconds:
            gain = 100 * (plan.seconds / faster.seconds - 1)
            lines.append(f"Training does not run yet what is predicted to be {gain:.0f} % faster: {_in_words(faster)}.")
        if plan.devices < (devices := self.problems.cluster.devices):
            lines.append(
                f"It takes {plan.devices:,} of the {devices:,} devices: on more, no plan that training runs is "
                f"predicted to be {100 * choice.margin:.0f} % faster."
            )
        if (small := batch_warning(self.problems)) is not None:
            lines.append(small)
        if (slow := loading_warning(self._cores(self.shown) or 0.0, self.problems.cluster.device)) is not None:
            lines.append(slow)
        if self.given is not None:
            lines += self._verdict_on_given(self.given)
        return "\n".join(lines)

    def _because(self) -> str:
        """The reason of the recommendation; nothing where there was nothing to choose from."""
        choice = self.choices.recommended
        alike = kinds_alike(choice.predictions)
        return "" if len(alike) == 1 else f", because {choice.reason}"

    def _verdict_on_given(self, given: ModelledPlan) -> list[str]:
        cluster, best = self.problems.cluster, self.choices.recommended.chosen
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
            also = ("expert", "shard", "replicas", "schedule", "cut")
            roles[role] = {
                "layout": layout.degrees | {name: getattr(layout, name) for name in also},
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
            "loading_cores": self._cores(plan),
            "peak_bytes": plan.peak_bytes,
            "roles": roles,
        }

    def _heading(self) -> str:
        problem = self.problems.of_trunk
        cluster, load = problem.cluster, problem.load
        sizes = ", ".join(f"{role} {_billions(half.parameters)}" for role, half in self.module.roles.items())
        samples, microbatches = counted(round(load.items), "sample"), "microbatches"
        if load.forwards is not None:
            samples, microbatches = f"about {samples}", counted(load.forwards, "microbatch")
        return (
            f"{self.module.name} ({sizes}) on {cluster.devices} {cluster.device.name}, {cluster.per_node} a node\n"
            f"A step has {samples}, {tokens_in_words(self.problems)}, in {microbatches} of up to {load.budget:,} "
            f"tokens; data: {self.data}."
        )

    def _shown_in_words(self) -> str:
        plan, limit = self.shown, usable_bytes(self.problems.cluster)
        rate = f"{in_digits(plan.samples_per_second, 4)} samples/s, {100 * plan.mfu:.1f} % of the peak FLOP/s (MFU)"
        lines = [
            ("a step", f"{in_digits(plan.seconds, 4)} s; 80 % of measured ones from {_span(plan)}; {rate}"),
            (
                "memory",
                f"{plan.peak_bytes / 1e9:.1f} GB of the {limit / 1e9:.1f} GB of a device that can be planned for",
            ),
            *((role, candidate_in_words(one) + self._kept_by(role)) for role, one in plan.chosen.items()),
        ]
        if (cores := self._cores(plan)) is not None:
            lines.append(("loading", loading_in_words(cores)))
        if self.kept is not None:
            lines.append(("kept", self.kept.text()))
        longest = max(len(name) for name, _ in lines)
        return "\n".join(f"  {name:<{longest}}  {words}" for name, words in lines)

    def _kept_by(self, role: str) -> str:
        """The encoder batches of which a rank keeps activations, where they are not as many as usual."""
        kept, trains = self.workload.encoder_activations, self.problems[role].half.trains
        if kept == ENCODER_BATCHES_IN_FLIGHT or role not in self.problems.encoders or not trains:
            return ""
        return f"; activations of {counted(kept, 'encoder batch')} are kept (encoder_activations)"

    def _table(self) -> str:
        """The plans that differ, the fastest first; the recommended one is marked."""
        choice = self.choices.recommended
        lines = []
        for plan, others in sorted(kinds_alike(choice.predictions), key=lambda each: each[0].seconds):
            is_chosen = choice.chosen is plan or choice.chosen.name in others
            name = " = ".join([plan.name, *others])
            cells = (in_digits(plan.seconds, 4), in_digits(plan.samples_per_second, 4), *plan.cells().values())
            lines.append((f"{'>' if is_chosen else ' '} {name}", *cells))
        return text_table(("", "s/step", "samples/s", *choice.chosen.cells()), lines)

    def _next(self) -> list[str]:
        """The next command, where there is something to start."""
        plan = self.choices.recommended.chosen
        if why_plan_cannot_run(plan, self.problems) is not None:
            return []
        if len(self.problems) == 1:
            how = "FSDPStrategy()" if plan.chosen[self.problems.trunk].layout.shard == "fsdp" else "DDPStrategy()"
            return [f"Next: {self.module.name} reads text alone, so train it with Lightning's own {how}."]
        workers = workers_for(self._cores(plan) or 0.0)
        return [f"Next: {next_command(plan, self.problems.of_trunk, self.file, workers, self.workload)}"]

    def _cores(self, plan: ModelledPlan) -> float | None:
        return cores_for_pictures(plan, self.problems, self.module)


def smallest_full_batch(problems: Problems) -> int | None:
    """Samples of a step that give every device a full microbatch; None where the batch gives half of that."""
    load, devices = problems.load, problems.cluster.devices
    if load.tokens >= devices * load.budget / 2:
        return None
    return ceil(devices * load.budget / (load.tokens / load.items))


def batch_warning(problems: Problems) -> str | None:
    """That the batch is too small for the devices, with one that would do; None where it is not."""
    if (samples := smallest_full_batch(problems)) is None:
        return None
    load, devices = problems.load, problems.cluster.devices
    if load.forwards is not None:
        return (
            f"A step of {counted(load.forwards, 'microbatch')} is small for {devices:,} devices: --microbatches "
            f"{devices} would give each of them one."
        )
    return (
        f"The batch of {counted(round(load.items), 'sample')} is small for {devices:,} devices: {samples:,} samples "
        f"would give each of them a microbatch of {load.budget:,} tokens."
    )


def given_in_words(plan: ModelledPlan, problems: Problems) -> str:
    """Describes a given layout in sentences, where there is no plan to show it beside."""
    limit = usable_bytes(problems.cluster) / 1e9
    return f"{_time_of_given(plan)}, and {plan.peak_bytes / 1e9:.1f} GB of the {limit:.1f} that can be planned for."


def _time_of_given(plan: ModelledPlan) -> str:
    return f"Yours ({plan.name}): {in_digits(plan.seconds, 4)} s a step ({_span(plan)})"


def _span(plan: ModelledPlan) -> str:
    return f"{in_digits(plan.seconds_low, 3)} to {in_digits(plan.seconds_high, 3)}"


def _in_words(plan: ModelledPlan) -> str:
    layouts = (f"{role} {one.layout.describe()}" for role, one in plan.chosen.items())
    return f"{plan.name} with {'; '.join(layouts)}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"
