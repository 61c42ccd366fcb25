"""The command ``flowtrain plan``: how to split a module over devices, and what a step will take."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import (
    DEVICES,
    PRECISIONS,
    WHOLE_COPIES,
    Allocation,
    Cluster,
    Device,
    ModelledCosts,
    ModuleDescription,
    NoPlanError,
    PlanningError,
    SearchSpace,
    Workload,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import given_plan
from flowtrain_lightning.allocator.plan_file import read_plan, write_plan
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.allocator.role_problem import OPTIMIZERS
from flowtrain_lightning.allocator.workload import LOSS_CHUNK
from flowtrain_lightning.cli.command_table import command_parser
from flowtrain_lightning.cli.plan_bill import bill_of
from flowtrain_lightning.cli.plan_choice import Choices, choose_plans, why_plan_cannot_run
from flowtrain_lightning.cli.plan_input import (
    devices_per_node,
    read_device,
    read_efficiencies,
    read_module,
    read_workload,
)
from flowtrain_lightning.cli.plan_report import PlanReport, given_in_words
from flowtrain_lightning.placement.profile import ProfileError, read_profile
from flowtrain_lightning.placement.text_table import text_table

MISTAKES = (PlanningError, ProfileError)

SEARCH = "search"
"""What ``--token-budget`` says to have the budget found."""


def run() -> None:
    """Compare placements and print the recommended plan.

    Raises:
        PlanningError: an option or a file cannot be used, or the module fits in no layout.
        UsageError: the file of lengths cannot be used.
        ProfileError: the profile cannot be read, or is of something else.
    """
    options = _parser().parse_args(sys.argv[2:])
    module = read_module(options.model).with_frozen(*options.freeze)
    if options.lora is not None:
        module = module.with_adapters(options.lora)
    device = read_device(options.device)
    per_node = devices_per_node(options.devices, device, options.nodes)
    searched = options.token_budget == SEARCH
    settings = {
        "global_batch_size": options.batch,
        "token_budget": None if searched else options.token_budget,
        "encoder_budget": options.encoder_budget,
        "loss_chunk": options.loss_chunk,
    }
    workload = read_workload(options.data, module, settings)
    for name, value in (("time-to-train", options.time_to_train), ("price", options.price)):
        if value is not None and not 0 < value < inf:
            raise PlanningError(f"--{name} is {value:g}; it must be a number above 0.")
    if options.price is not None and options.time_to_train is None:
        raise PlanningError("--price needs --time-to-train, which says for how many tokens.")
    if options.sweep:
        if options.out is not None:
            raise PlanningError("--out writes one plan, but --sweep makes many; leave out one of them.")
        _sweep(options, module, device, per_node, workload)
        return
    cluster = Cluster(device, options.devices, per_node)
    layout = None if options.layout is None else read_plan(options.layout)
    workloads = _with_larger_budgets(workload) if searched else [workload]
    costs, choices = _fastest([_costs(options, module, cluster, one) for one in workloads], layout)
    data = "typical lengths, assumed" if options.data is None else str(options.data)
    given = None if layout is None else given_plan(costs.problems, layout)
    shown = choices.recommended.chosen if given is None else given
    tokens = options.time_to_train
    bill = None if tokens is None else bill_of(shown, costs.problems, tokens, options.price)
    report = PlanReport(choices, costs.problems, module, data, given, bill)
    if options.out is not None:
        _write(report, per_node, options.out)
    if options.plot is not None:
        from flowtrain_lightning.cli.plots import draw_plan

        draw_plan(report, options.plot)
    print(json.dumps(report.values()) if options.json else report.text())


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan")
    add = parser.add_argument
    add("--model", required=True, help=f"a config.json, dimensions in YAML, or one of {', '.join(CONFIGS)}")
    add("--devices", type=int, required=True, help="how many in all")
    add("--device", default="h100", help=f"{', '.join(DEVICES)}, or a YAML file (default: %(default)s)")
    add("--nodes", type=int, help="in how many nodes (default: as many devices a node as usual)")
    add("--data", type=Path, metavar="LENGTHS.parquet", help="columns tokens, image_tokens … (default: typical ones)")
    add("--freeze", action="append", default=[], help="encoder, tower (all but projectors) or backbone; repeatable")
    add(
        "--profile",
        "--calibrate",
        type=Path,
        metavar="PROFILE.json",
        help="how fast this module was measured to be on the device",
    )
    add("--batch", "--global-batch-size", type=int, default=256, help="samples of a step (default: %(default)s)")
    add("--token-budget", type=_budget, default=8192, help="the most tokens of a microbatch, or search (default: 8192)")
    add(
        "--loss-chunk",
        type=int,
        default=LOSS_CHUNK,
        metavar="TOKENS",
        help="tokens whose logits the loss holds at a time (default: %(default)s, as the models of Hugging Face here)",
    )
    add("--encoder-budget", type=int, default=16384, help="of an encoder batch (default: %(default)s)")
    add("--precision", choices=list(PRECISIONS), default="bf16-mixed", help="default: %(default)s")
    add("--optimizer", choices=list(OPTIMIZERS), default=OPTIMIZERS[0], help="default: %(default)s")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank in place of the backbone's weights")
    add("--frozen-bf16", action="store_true", help="weights that do not train are kept in bf16")
    add("--offload-activations", action="store_true", help="keep them in the host's memory until the backward")
    add("--whole-copies", action="store_true", help="only layouts in which a rank holds all of its half")
    add("--layout", type=Path, metavar="PLAN.yaml", help="an allocation of your own, shown beside the best one")
    add("--time-to-train", type=float, metavar="TOKENS", help="hours of training on so many backbone tokens")
    add("--price", type=float, metavar="PER_HOUR", help="of a device, for the cost of --time-to-train")
    add("--sweep", action="store_true", help="the best plan for 1, 2, 4 … devices")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--out", type=Path, metavar="PLAN.yaml", help="write the recommended plan")
    add("--plot", type=Path, metavar="PLOT.png", help="draw step and memory, or the sweep")
    return parser


def _costs(
    options: argparse.Namespace, module: ModuleDescription, cluster: Cluster, workload: Workload
) -> ModelledCosts:
    profile = None if options.profile is None else read_profile(options.profile)
    efficiencies = read_efficiencies(profile, module, workload, cluster.device, options.precision)
    precision = replace(
        PRECISIONS[options.precision].with_optimizer(options.optimizer),
        frozen=2 if options.frozen_bf16 else None,
        host_activations=options.offload_activations,
    )
    problems = role_problems(module, workload, cluster, precision, efficiencies)
    return ModelledCosts(problems, WHOLE_COPIES if options.whole_copies else SearchSpace())


def _with_larger_budgets(workload: Workload) -> list[Workload]:
    """The workload with token budgets from its longest sample, or the default, to eight times as many."""
    least = max(int(workload.tokens.max()), workload.token_budget // 2)
    return [replace(workload, token_budget=least * 2**power) for power in range(4)]


def _fastest(budgets: Sequence[ModelledCosts], layout: Allocation | None) -> tuple[ModelledCosts, Choices]:
    """The plans of the token budget with the fastest step; of those that cannot be told apart the smallest budget.

    Raises:
        NoPlanError: nothing fits; says also what a layout that is given would take.
    """
    found: list[tuple[ModelledCosts, Choices]] = []
    refusals: list[str] = []
    for costs in budgets:
        try:
            found.append((costs, choose_plans(costs)))
        except NoPlanError as refusal:
            refusals.append(str(refusal))
    if not found:
        own = [] if layout is None else [given_in_words(given_plan(budgets[0].problems, layout), budgets[0].problems)]
        raise NoPlanError(" ".join([refusals[0], *own]))
    fastest = min(choices.recommended.chosen.seconds for _, choices in found)
    enough = fastest * (1 + ModelledCosts.margin)
    return next(one for one in found if one[1].recommended.chosen.seconds <= enough)


def _budget(text: str) -> int | str:
    if text == SEARCH:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor {SEARCH!r}") from None


def _write(report: PlanReport, per_node: int, path: Path) -> None:
    plan, device = report.choices.recommended.chosen, report.problems["backbone"].cluster
    heading = [
        f"{report.module.name} on {device.devices} {device.device.name}, {per_node} a node: {plan.name}.",
        f"Predicted: {plan.seconds:.3f} s a step (80 % band {plan.seconds_low:.3f} to {plan.seconds_high:.3f}), "
        f"{plan.samples_per_second:.1f} samples/s, {100 * plan.mfu:.1f} % MFU.",
    ]
    if (reason := why_plan_cannot_run(plan, report.problems)) is not None:
        heading.append(f"Training does not run it yet: it {reason}")
    write_plan(plan.allocation(per_node), path, "\n".join(heading))


def _sweep(
    options: argparse.Namespace, module: ModuleDescription, device: Device, per_node: int, workload: Workload
) -> None:
    counts = sorted({2**power for power in range(options.devices.bit_length())} | {options.devices})
    counts = [count for count in counts if count <= per_node or count % per_node == 0]
    found: list[dict[str, Any]] = []
    for count in counts:
        try:
            costs = _costs(options, module, Cluster(device, count, per_node), workload)
            best = choose_plans(costs).recommended.chosen
        except NoPlanError:
            found.append({"devices": count, "placement": None})
            continue
        figures = {"step_seconds": best.seconds, "samples_per_second": best.samples_per_second, "mfu": best.mfu}
        runs = why_plan_cannot_run(best, costs.problems) is None
        found.append({"devices": count, "placement": best.name, **figures, "runs_today": runs})
    if options.plot is not None:
        from flowtrain_lightning.cli.plots import draw_sweep

        draw_sweep(found, f"{module.name} on {device.name}", options.plot)
    print(json.dumps(found) if options.json else _sweep_text(found))


def _sweep_text(found: list[dict[str, Any]]) -> str:
    lines = [
        (str(each["devices"]), "does not fit", "", "", "", "")
        if each["placement"] is None
        else (
            str(each["devices"]),
            each["placement"],
            f"{each['step_seconds']:.4g}",
            f"{each['samples_per_second']:.4g}",
            f"{100 * each['mfu']:.1f} %",
            "yes" if each["runs_today"] else "not yet",
        )
        for each in found
    ]
    return text_table(("devices", "placement", "s/step", "samples/s", "MFU", "training runs it"), lines)
