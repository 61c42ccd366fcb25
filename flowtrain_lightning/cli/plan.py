"""The command ``flowtrain plan``: how to split a module over devices, and what a step will take."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import (
    WHOLE_COPIES,
    Cluster,
    Comparison,
    Device,
    ModuleDescription,
    NoPlanError,
    PlanningError,
    Workload,
    allocate,
    compare,
    role_problems,
)
from flowtrain_lightning.allocator.devices import DEVICES
from flowtrain_lightning.allocator.models import CONFIGS
from flowtrain_lightning.allocator.plan_file import write_plan
from flowtrain_lightning.allocator.precision import PRECISIONS
from flowtrain_lightning.cli.plan_input import read_device, read_module, read_workload
from flowtrain_lightning.cli.plan_text import as_text, as_values, columns
from flowtrain_lightning.profiling import measured_efficiencies, read_profile

PLAN_DESCRIPTION = "say how to split a module over devices, what a step takes, and whether splitting pays"


def plan() -> None:
    """Compare placements and print the recommended plan.

    Raises:
        PlanningError: an option or a file cannot be used, or the module fits in no layout.
    """
    options = _parser().parse_args(sys.argv[2:])
    module = read_module(options.model).with_frozen(*options.freeze)
    device = read_device(options.device)
    per_node = _devices_per_node(options, device)
    names = ("global_batch_size", "token_budget", "encoder_budget")
    workload = read_workload(options.data, module, {name: getattr(options, name) for name in names})
    if options.sweep:
        if options.out is not None:
            raise PlanningError("--out writes one plan, but --sweep makes many; leave out one of them.")
        _sweep(options, module, device, per_node, workload)
        return
    cluster = Cluster(device, options.devices, per_node)
    comparison = _compare(options, module, cluster, workload)
    data = "typical lengths, assumed" if options.data is None else str(options.data)
    if options.out is not None:
        _write(comparison, module, options.out)
    if options.plot is not None:
        from flowtrain_lightning.cli.plan_plot import draw_plan

        draw_plan(comparison, options.plot)
    print(json.dumps(as_values(comparison, module, data)) if options.json else as_text(comparison, module, data))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flowtrain plan", description=f"{PLAN_DESCRIPTION}.")
    add = parser.add_argument
    add("--model", required=True, help=f"a config.json, dimensions in YAML, or one of {', '.join(CONFIGS)}")
    add("--devices", type=int, required=True, help="how many in all")
    add("--device", default="h100", help=f"{', '.join(DEVICES)}, or a YAML file (default: %(default)s)")
    add("--nodes", type=int, help="in how many nodes (default: as many devices a node as usual)")
    add("--data", type=Path, metavar="LENGTHS.parquet", help="columns tokens, image_tokens … (default: typical ones)")
    add("--freeze", action="append", default=[], help="encoder, tower (all but projectors) or backbone; repeatable")
    add("--profile", type=Path, metavar="PROFILE.json", help="how fast this module was measured to be on the device")
    add("--global-batch-size", type=int, default=256, help="samples of a step (default: %(default)s)")
    add("--token-budget", type=int, default=8192, help="the most tokens of a microbatch (default: %(default)s)")
    add("--encoder-budget", type=int, default=16384, help="of an encoder batch (default: %(default)s)")
    add("--precision", choices=list(PRECISIONS), default="bf16-mixed", help="default: %(default)s")
    add("--whole-copies", action="store_true", help="only layouts in which a rank holds all of its half")
    add("--sweep", action="store_true", help="the best plan for 1, 2, 4 … devices")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--out", type=Path, metavar="PLAN.yaml", help="write the recommended plan")
    add("--plot", type=Path, metavar="PLOT.png", help="draw step and memory, or the sweep")
    return parser


def _devices_per_node(options: argparse.Namespace, device: Device) -> int:
    if options.devices < 1:
        raise PlanningError(f"There are {options.devices} devices; a plan needs at least 1.")
    if options.nodes is None:
        if options.devices > device.per_node and options.devices % device.per_node:
            raise PlanningError(
                f"{options.devices} devices cannot be divided into nodes of {device.per_node}, as is usual for "
                f"{device.name}; say with --nodes how many nodes there are."
            )
        return device.per_node
    if options.nodes < 1 or options.devices % options.nodes:
        raise PlanningError(f"{options.devices} devices cannot be divided into {options.nodes} equal nodes.")
    return int(options.devices // options.nodes)


def _compare(
    options: argparse.Namespace, module: ModuleDescription, cluster: Cluster, workload: Workload
) -> Comparison:
    efficiencies = None
    if options.profile is not None:
        efficiencies = measured_efficiencies(read_profile(options.profile), module, cluster.device, options.precision)
    problems = role_problems(module, workload, cluster, options.precision, efficiencies)
    return compare(problems, WHOLE_COPIES if options.whole_copies else None)


def _write(comparison: Comparison, module: ModuleDescription, path: Path) -> None:
    best, cluster = comparison.best, comparison.problems["backbone"].cluster
    heading = (
        f"{module.name} on {cluster.devices} {cluster.device.name}, {cluster.per_node} a node: {best.name}.\n"
        f"Predicted: {best.seconds:.3f} s a step, {best.samples_per_second:.1f} samples/s, {100 * best.mfu:.1f} % MFU."
    )
    recompute = {role: candidate.recompute for role, candidate in best.chosen.items()}
    write_plan(allocate(best, cluster.per_node), path, heading, recompute)


def _sweep(
    options: argparse.Namespace, module: ModuleDescription, device: Device, per_node: int, workload: Workload
) -> None:
    counts = sorted({2**power for power in range(options.devices.bit_length())} | {options.devices})
    counts = [count for count in counts if count <= per_node or count % per_node == 0]
    rows: list[dict[str, Any]] = []
    for count in counts:
        try:
            best = _compare(options, module, Cluster(device, count, per_node), workload).best
        except NoPlanError:
            rows.append({"devices": count, "placement": None})
            continue
        figures = {"step_seconds": best.seconds, "samples_per_second": best.samples_per_second, "mfu": best.mfu}
        rows.append({"devices": count, "placement": best.name, **figures})
    if options.plot is not None:
        from flowtrain_lightning.cli.plan_plot import draw_sweep

        draw_sweep(rows, f"{module.name} on {device.name}", options.plot)
    print(json.dumps(rows) if options.json else _sweep_text(rows))


def _sweep_text(rows: list[dict[str, Any]]) -> str:
    cells = [
        (str(row["devices"]), "does not fit", "", "", "")
        if row["placement"] is None
        else (
            str(row["devices"]),
            row["placement"],
            f"{row['step_seconds']:.3f}",
            f"{row['samples_per_second']:,.1f}",
            f"{100 * row['mfu']:.1f} %",
        )
        for row in rows
    ]
    return columns(("devices", "placement", "step s", "samples/s", "MFU"), cells)
