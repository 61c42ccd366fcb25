"""The command ``flowtrain simulate``: steps of a plan, simulated with measured or modelled costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import (
    DEVICES,
    Allocation,
    Cluster,
    PlanningError,
    Workload,
    role_problems,
)
from flowtrain_lightning.allocator.devices import fewest_nodes
from flowtrain_lightning.allocator.digits import in_digits
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.cli.command_table import UsageError, command_parser
from flowtrain_lightning.cli.lengths import read_sizes
from flowtrain_lightning.cli.plan_input import (
    devices_per_node,
    read_device,
    read_efficiencies,
    read_module,
)
from flowtrain_lightning.cli.plan_loading import decoding_seconds
from flowtrain_lightning.cli.plan_step_size import add_step_size, in_steps
from flowtrain_lightning.cli.plan_training import add_training, precision_of, said_of_training, trained
from flowtrain_lightning.packing import DEFAULT_COST, IMAGE, PackingError, SampleSizes
from flowtrain_lightning.placement.drawn_steps import steps_of
from flowtrain_lightning.placement.layout_costs import LayoutCosts, ModelledLayoutCosts, ProfiledLayoutCosts
from flowtrain_lightning.placement.profile import Profile, ProfileError, read_profile
from flowtrain_lightning.placement.request import batches_kept, refuse_what_cannot_run
from flowtrain_lightning.placement.simulation import PURPOSES, Activity, Simulation, simulate
from flowtrain_lightning.placement.text_table import text_table

MISTAKES = (PlanningError, PackingError, ProfileError)


def run() -> None:
    """Simulate steps and print what they take.

    Raises:
        PlanningError: an option cannot be used.
        AllocationError: the plan cannot be read or does not run, or nothing says what it takes.
        ProfileError: the profile cannot be read.
        PackingError: samples do not fit into microbatches, or there are none.
        UsageError: the file of lengths cannot be used.
    """
    options = _parser().parse_args(sys.argv[2:])
    for name, least in (("steps", 1), ("encoder_activations", 1), ("seed", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise PlanningError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    allocation = read_plan(options.plan)
    refuse_what_cannot_run(allocation, str(options.plan))
    profile = None if options.profile is None else read_profile(options.profile)
    sizes = read_sizes(options.data, _modalities(allocation))
    if not len(sizes):
        raise PlanningError(f"{options.data} has no samples to make steps of.")
    budgets = (_token_budget(options.token_budget, profile), options.encoder_budget)
    workload = in_steps(_workload(sizes, *budgets), options, is_assumed=False)
    costs, decoding = _costs(options, allocation, workload, profile)
    cost, media_costs = (DEFAULT_COST, {}) if profile is None else (profile.cost, profile.media_costs)
    steps = steps_of(workload, sizes, cost, media_costs, options.steps, options.seed)
    kept = batches_kept(options.encoder_activations, allocation)
    found = simulate(steps.packed(allocation), allocation, costs, kept)
    if decoding is not None:
        found = found.waiting_for(decoding)
    if options.plot is not None:
        _draw(found, options.plot)
    print(json.dumps(_values(found)) if options.json else _text(found, profile, options))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("simulate")
    add = parser.add_argument
    add("--plan", type=Path, required=True, metavar="PLAN.yaml", help="which ranks do what, as `flowtrain plan` writes")
    add("--data", type=Path, required=True, metavar="LENGTHS.parquet", help="columns tokens and image_tokens (a list)")
    add("--profile", type=Path, metavar="PROFILE.json", help="what the halves were measured to take on one device")
    add("--model", help=f"by dimensions, in any layout: a config.json, YAML, or one of {', '.join(CONFIGS)}")
    add("--device", default="h100", help=f"of --model: {', '.join(DEVICES)}, or a YAML file (default: %(default)s)")
    add("--nodes", type=int, help="of --model: how many there are (default: as many devices a node as usual)")
    add_training(parser, "of --model: ")
    add("--steps", type=int, help="how many (default: 10, and more of them where each has few samples)")
    add_step_size(parser)
    add("--token-budget", type=int, help="the most tokens of a microbatch (default: that of the profile, or 8192)")
    add("--encoder-activations", type=int, help="encoder batches that a rank keeps (default: as the plan says, or 4)")
    add("--seed", type=int, default=0, help="decides which samples make a step (default: %(default)s)")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--plot", type=Path, metavar="TIMELINE.png", help="draw what the lanes do in one step")
    return parser


def _modalities(allocation: Allocation) -> tuple[str, ...]:
    """Modalities of media by name, where media of several are taken; images stand for whatever a lone encoder takes."""
    graph = allocation.graph
    named = tuple(graph.modality_of(role) or IMAGE for role in (*graph.producers, *graph.behind))
    return named if len(named) > 1 else ()


def _token_budget(given: int | None, profile: Profile | None) -> int:
    if given is not None:
        return given
    return Workload.token_budget if profile is None else int(profile.origin.settings["token_budget"])


def _workload(sizes: SampleSizes, token_budget: int, encoder_budget: int) -> Workload:
    """The data as planning takes them."""
    media, content = {}, {}
    for modality in sizes.modalities:
        own = sizes.of_modality(modality)
        media[modality] = sizes.media_patches[own]
        if sizes.media_content is not None:
            content[modality] = sizes.media_content[own]
    return Workload(sizes.tokens, media, token_budget=token_budget, encoder_budget=encoder_budget, content=content)


def _costs(
    options: argparse.Namespace, allocation: Allocation, workload: Workload, profile: Profile | None
) -> tuple[LayoutCosts, float | None]:
    """Costs by the module's dimensions, which a profile may calibrate, or by the profile alone; and those of hosts.

    These are the seconds of a step in which hosts decode pictures, if dimensions say how large these are.
    """
    if options.model is None:
        if profile is None:
            raise UsageError("what a step takes follows from --profile, from the module's --model, or from both.")
        if (said := said_of_training(options)) is not None:
            raise UsageError(
                f"{said} changes what the dimensions of --model take, but {options.profile} is of the module as it was "
                f"measured. Give --model too, or leave {said} out."
            )
        return ProfiledLayoutCosts(profile, allocation), None
    module, device = trained(read_module(options.model), options), read_device(options.device)
    if len(module.encoders) == 1:  # takes whatever there is
        media, content = (
            {name: of[IMAGE] for name in module.encoders if IMAGE in of and len(workload.media[IMAGE])}
            | {name: of[name] for name in module.generators if name in of}
            for of in (workload.media, workload.content)
        )
        workload = replace(workload, media=media, content=content)
    most = max((patches.sum() for patches in workload.media.values()), default=0)
    of_a_microbatch = max(1, round(workload.token_budget * most / workload.tokens.sum()))
    of_a_batch = min(workload.encoder_budget, of_a_microbatch)  # what one microbatch reads is a batch, if it fits
    workload = replace(workload, encoder_budget=of_a_batch)
    is_uneven = allocation.size > device.per_node and allocation.size % device.per_node  # it leaves devices out
    together = lcm(*(layout.tensor for layout in allocation.layouts.values()))
    fewest = fewest_nodes(allocation.size, device.per_node, together)
    nodes = fewest if is_uneven and not options.nodes else options.nodes
    cluster = Cluster(device, allocation.size, devices_per_node(allocation.size, device, nodes))
    shares = read_efficiencies(profile, module, workload, device, options.precision)
    problems = role_problems(module, workload, cluster, precision_of(options), shares)
    members = {role: layout.data for role, layout in allocation.layouts.items()}
    costs = ModelledLayoutCosts(problems, allocation)  # which refuses other roles
    decoding = decoding_seconds(problems, module, members, apart=allocation.placement == "separate")
    return costs, None if decoding is None else decoding / device.cores


def _source(options: argparse.Namespace, profile: Profile | None) -> str:
    """The source of costs."""
    measured = "" if profile is None else f"the costs of {options.profile} ({profile.origin.device})"
    if options.model is None:
        return measured
    return f"the dimensions of {options.model} on {options.device}" + (measured and f", calibrated by {measured}")


def _text(found: Simulation, profile: Profile | None, options: argparse.Namespace) -> str:
    seconds = found.step_seconds
    least, most = min(found.seconds), max(found.seconds)
    lines_of_roles = []
    for role, shares in found.shares.items():
        spent = [f"{100 * shares[purpose]:.1f} %" for purpose in PURPOSES]
        lines_of_roles.append((role, str(len(found.allocation.ranks[role])), *spent))
    lines = [
        found.allocation.describe(),
        f"{len(found.seconds)} steps of {options.data} by {_source(options, profile)}",
        "",
        f"a step: {in_digits(seconds, 4)} s ({in_digits(least, 4)} to {in_digits(most, 4)}), "
        f"{in_digits(found.samples / seconds, 4)} samples/s, "
        f"{found.tokens / seconds:,.0f} tokens/s",
        "",
        text_table(("where time goes", "ranks", *PURPOSES), lines_of_roles),
    ]
    several = any(len(ranks) > 1 for ranks in found.allocation.ranks.values())
    if options.model is None and profile is not None and profile.reduction is None and several:
        lines += ["", "The profile does not say how long ranks take to sum gradients; here exchange takes no time."]
    return "\n".join(lines)


def _values(found: Simulation) -> dict[str, Any]:
    seconds = found.step_seconds
    return {
        "allocation": found.allocation.state_dict(),
        "step_seconds": seconds,
        "seconds": found.seconds,
        "samples_per_second": found.samples / seconds,
        "tokens_per_second": found.tokens / seconds,
        "shares": found.shares,
    }


def _draw(found: Simulation, path: Path) -> None:
    from flowtrain_lightning.callbacks.timeline_recorder import DRAWN_RANKS, draw_step  # which imports Lightning

    ranks = {rank for of_role in found.allocation.ranks.values() for rank in of_role[:DRAWN_RANKS]}
    try:
        draw_step(_timelines(found, ranks), path, found.allocation.size)
    except ImportError as error:
        raise PlanningError(
            "--plot needs matplotlib; install it with: pip install 'flowtrain-lightning[plot]'"
        ) from error
    except (OSError, ValueError) as error:
        raise PlanningError(f"{path} cannot be written: {error}") from error


def _timelines(found: Simulation, ranks: set[int]) -> list[dict[str, Any]]:
    """The simulated work of ranks, in the form in which real runs record theirs."""
    from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, STALL, Span

    works: dict[int, list[Activity]] = defaultdict(list)
    windows: dict[int, tuple[float, float]] = {}
    spans: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for one in found.activities:
        works[one.rank].append(one)
        if one.rank not in ranks or one.name == "optimizer":  # no more than in a picture of a real run
            continue
        kind = COMMUNICATION if one.name == "reduction" else COMPUTE
        spans[one.rank].append(Span(one.role, kind, one.name, "train", one.step, one.number, one.start, one.end))
        start, end = windows.get(one.step, (one.start, one.end))
        windows[one.step] = min(start, one.start), max(end, one.end)
    for rank, of_rank in spans.items():
        for step, window in windows.items():
            for start, end in _idle(works[rank], *window):
                lanes = [role for role, members in found.allocation.ranks.items() if rank in members]
                of_rank += [Span(role, STALL, "wait", "train", step, -1, start, end) for role in lanes]
    return [
        {"rank": rank, "label": " and ".join(_lanes_of(rank, found.allocation)), "spans": of_rank}
        for rank, of_rank in sorted(spans.items())
    ]


def _idle(works: Sequence[Activity], start: float, end: float) -> Iterator[tuple[float, float]]:
    """The times between ``start`` and ``end`` in which a rank does none of its works."""
    for one in sorted(works, key=lambda one: one.start):
        if one.start >= end:
            break
        if one.start > start:
            yield start, one.start
        start = max(start, one.end)
    if start < end:
        yield start, end


def _lanes_of(rank: int, allocation: Allocation) -> Iterator[str]:
    for role in allocation.layouts:
        if (lane := allocation.rank_within(role, rank)) is not None:
            yield f"{role} {lane}"
