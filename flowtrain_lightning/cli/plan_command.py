"""The command ``flowtrain plan``: how to split a module over devices, and what a step will take."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

from flowtrain_lightning.allocator import (
    DEVICES,
    WHOLE_COPIES,
    Allocation,
    Cluster,
    NoPlanError,
    PlanningError,
    SearchSpace,
)
from flowtrain_lightning.allocator.plan_file import read_plan, write_plan
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.allocator.workload import ENCODER_BATCHES_IN_FLIGHT, LOSS_CHUNK
from flowtrain_lightning.cli.command_table import command_parser
from flowtrain_lightning.cli.plan_bill import Price, bill_of, read_price
from flowtrain_lightning.cli.plan_choice import Choices, why_plan_cannot_run
from flowtrain_lightning.cli.plan_input import devices_per_node, read_device, read_module, read_workload
from flowtrain_lightning.cli.plan_kept import kept_plan
from flowtrain_lightning.cli.plan_question import PlanQuestion, best_budget
from flowtrain_lightning.cli.plan_remedies import refusal
from flowtrain_lightning.cli.plan_report import PlanReport, given_in_words
from flowtrain_lightning.cli.plan_step_size import add_step_size, in_steps
from flowtrain_lightning.cli.plan_sweep import sweep
from flowtrain_lightning.cli.plan_training import add_training, precision_of, trained
from flowtrain_lightning.placement.profile import ProfileError, read_profile

MISTAKES = (PlanningError, ProfileError)

SEARCH = "search"
"""The value of ``--token-budget`` with which the budget is searched."""


def run() -> None:
    """Compare placements and print the recommended plan.

    Raises:
        PlanningError: an option or a file cannot be used, or the module fits in no layout.
        UsageError: the file of lengths cannot be used.
        ProfileError: the profile cannot be read, or is of something else.
    """
    options = _parser().parse_args(sys.argv[2:])
    price = _price(options)
    if options.sweep and options.out is not None:
        raise PlanningError("--out writes one plan, but --sweep makes many; leave out one of them.")
    if options.sweep and options.layout is not None:
        raise PlanningError("--layout is for one number of devices, but --sweep plans for many; leave out one of them.")
    question, is_searched = _question(options), options.token_budget == SEARCH
    if options.sweep:
        sweep(question, options.time_to_train, price, options.plot, as_json=options.json, searches=is_searched)
        return
    layout = None if options.layout is None else read_plan(options.layout)
    question = (best_budget(question) if is_searched else question).as_it_fits()
    choices = _answer(question, layout)
    data = "typical lengths, assumed" if options.data is None else str(options.data)
    given = None if layout is None else question.given(layout)
    shown = choices.recommended.chosen if given is None else given
    tokens = options.time_to_train
    bill = None if tokens is None else bill_of(shown, question.problems, tokens, price)
    kept = kept_plan(choices.recommended.chosen, question.costs, question.simulator)
    asked = (question.problems, question.module, data, question.workload)
    report = PlanReport(choices, *asked, given, bill, options.out, kept)
    if options.out is not None:
        _write(report, options.out)
    if options.plot is not None:
        from flowtrain_lightning.cli.plots import draw_plan

        draw_plan(report, options.plot)
    print(json.dumps(report.values()) if options.json else report.text(options.verbose))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan")
    add = parser.add_argument
    add("--model", required=True, help=f"a config.json, dimensions in YAML, or one of {', '.join(CONFIGS)}")
    add("--devices", type=int, required=True, help="how many in all")
    add("--device", default="h100", help=f"{', '.join(DEVICES)}, or a YAML file (default: %(default)s)")
    add("--nodes", type=int, help="in how many nodes (default: as many devices a node as usual)")
    add("--data", type=Path, metavar="LENGTHS.parquet", help="columns tokens, image_tokens … (default: typical ones)")
    add_training(parser)
    add(
        "--profile",
        "--calibrate",
        type=Path,
        metavar="PROFILE.json",
        help="how fast this module was measured to be on the device",
    )
    add_step_size(parser)
    add(
        "--encoder-activations",
        type=int,
        metavar="BATCHES",
        help="of which an encoder that trains keeps the activations, as in FlowTrainStrategy (default: "
        f"{ENCODER_BATCHES_IN_FLIGHT}, or as many as fit)",
    )
    add("--token-budget", type=_budget, default=8192, help="the most tokens of a microbatch, or search (default: 8192)")
    add(
        "--loss-chunk",
        type=int,
        default=LOSS_CHUNK,
        metavar="TOKENS",
        help="tokens whose logits the loss holds at a time (default: %(default)s, as the models of Hugging Face here)",
    )
    add("--offload-activations", action="store_true", help="keep them in the host's memory until the backward")
    add("--whole-copies", action="store_true", help="only layouts in which a rank holds all of its half")
    add("--layout", type=Path, metavar="PLAN.yaml", help="an allocation of your own, shown beside the best one")
    add("--time-to-train", type=float, metavar="TOKENS", help="hours of training on so many backbone tokens")
    add("--price", metavar="PER_HOUR", help="of a device, as 2.5 (US dollars) or 2.5EUR: the cost of --time-to-train")
    add("--sweep", action="store_true", help="the best plan for 1, 2, 4 … devices")
    add("--verbose", action="store_true", help="show bars of memory and of a step too")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--out", type=Path, metavar="PLAN.yaml", help="write the recommended plan")
    add("--plot", type=Path, metavar="PLOT.png", help="draw step and memory, or the sweep")
    return parser


def _price(options: argparse.Namespace) -> Price | None:
    """The price of a device's hour, if that was said; refuses a bill that cannot be made."""
    tokens = options.time_to_train
    if tokens is not None and not 0 < tokens < inf:
        raise PlanningError(f"--time-to-train is {tokens:g}; it must be a number above 0.")
    if options.price is None:
        return None
    if tokens is None:
        raise PlanningError("--price needs --time-to-train, which says for how many tokens.")
    return read_price(options.price)


def _question(options: argparse.Namespace) -> PlanQuestion:
    module = trained(read_module(options.model), options)
    device = read_device(options.device)
    per_node, kept = devices_per_node(options.devices, device, options.nodes), options.encoder_activations
    settings = {
        "token_budget": None if options.token_budget == SEARCH else options.token_budget,
        "encoder_budget": options.encoder_budget,
        "encoder_activations": ENCODER_BATCHES_IN_FLIGHT if kept is None else kept,
        "loss_chunk": options.loss_chunk,
    }
    space = WHOLE_COPIES if options.whole_copies else SearchSpace()
    return PlanQuestion(
        module,
        Cluster(device, options.devices, per_node),
        in_steps(read_workload(options.data, module, settings), options, is_assumed=options.data is None),
        options.data,
        precision_of(options),
        None if options.profile is None else read_profile(options.profile),
        replace(space, offload="activations" if options.offload_activations else "none"),
        keeps_as_asked=kept is not None,
    )


def _answer(question: PlanQuestion, layout: Allocation | None) -> Choices:
    """The plans to show.

    Raises:
        NoPlanError: nothing fits; says what would do, and what a layout that is given would take.
    """
    if question.running or question.costs.every_plan:
        return question.answer()
    own = [] if layout is None else [given_in_words(question.given(layout), question.problems)]
    raise NoPlanError(" ".join([refusal(question), *own]))


def _budget(text: str) -> int | str:
    if text == SEARCH:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor {SEARCH!r}") from None


def _write(report: PlanReport, path: Path) -> None:
    plan, cluster = report.choices.recommended.chosen, report.problems.cluster
    if len(report.problems) == 1:
        raise PlanningError(
            f"--out writes which ranks encode and which do not, but {report.module.name} has no encoder; leave it out."
        )
    heading = [
        f"{report.module.name} on {cluster.devices} {cluster.device.name}, {cluster.per_node} a node: {plan.name}.",
        f"Predicted: {plan.seconds:.3f} s a step (80 % band {plan.seconds_low:.3f} to {plan.seconds_high:.3f}), "
        f"{plan.samples_per_second:.1f} samples/s, {100 * plan.mfu:.1f} % MFU.",
        f"For microbatches of up to {report.problems.load.budget} tokens (token_budget) and encoder batches "
        f"of up to {report.workload.encoder_budget} patches (encoder_budget).",
    ]
    if (reason := why_plan_cannot_run(plan, report.problems)) is not None:
        heading.append(f"Training does not run it yet: it {reason}")
    allocation, kept = plan.allocation(cluster.per_node), report.workload.encoder_activations
    if kept != ENCODER_BATCHES_IN_FLIGHT:
        allocation = replace(allocation, encoder_activations=kept)
    write_plan(allocation, path, "\n".join(heading))
