"""The recommended plans of eight public models on 8 to 4,096 devices, as a page: ``python -m benchmarks.public_plans``.

Writes ``docs/public_plans.md``, which takes minutes. After a change of the models of time or memory, review the plans
again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flowtrain_lightning.allocator import (
    DEVICES,
    Cluster,
    ModelledCosts,
    NoPlanError,
    named_model,
    role_problems,
    typical_workload,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.cli.plan_choice import choose_plans, why_plan_cannot_run

SAMPLES = {8: 256, 64: 512, 512: 4096, 4096: 32768}
"""Devices -> samples of a step."""

MODELS = (
    "smolvlm-2.2b",
    "qwen2.5-vl-7b",
    "qwen2-audio-7b",
    "qwen3-vl-8b",
    "gemma-3-27b",
    "qwen2.5-vl-72b",
    "internvl3-78b",
    "qwen3-vl-30b-a3b",
)

PAGE = Path(__file__).parents[1] / "docs/public_plans.md"

HEADING = """# Plans for eight public models

`flowtrain plan` recommends these on H100, 8 a node, in `bf16-mixed`, if everything trains, with microbatches of 8,192
tokens, [typical lengths](planning.md#what-it-reads), and 256, 512, 4,096 and 32,768 samples a step on 8, 64, 512 and
4,096 devices.

A plan is *uniform* with `fsdp` over all devices unless it says otherwise. It names replicas (HSDP groups), then what
encoder/backbone recompute. *If every layout ran* is faster by more than a tenth, and does not run yet. Written by
`python -m benchmarks.public_plans`.

| model | devices | plan | s/step (80 % band) | MFU |
|---|---|---|---|---|
"""

REVIEWS = """
Would a practitioner run them? Each was reviewed by hand:

- **2.2B**: yes; whole copies with ZeRO-1 are as usual. On 512 more samples would hide more exchange; few would use
  4,096.
- **7B and 8B**: yes, usual on one node. One ring over 512 ranks would cost more than groups. Without groups on 64
  there is less to recompute, though two groups of 32 would exchange less.
- **27B**: barely on 8, where 16 bytes a parameter take 55 of 80 GB: adapters or two nodes are usual. Yes on more: 4
  tensor ranks and a short pipeline (Megatron-LM) would gain little.
- **72B and 78B**: not on 8, since 16 bytes a parameter are 1.2 TB, nearly twice their memory; most would take 128
  rather than 64. There these plans run; Megatron-LM's 4 tensor ranks and 8 stages are a little faster and would be
  preferred.
- **30B-A3B**: not on 8, where 16 bytes a parameter take 62 of 80 GB: adapters or two nodes. On more, yes:
  two nodes share experts, as in Megatron-LM, since gathering all each microbatch takes 1.8 times as long.
"""


def row(model: str, devices: int) -> str:
    """The recommended plan as a line of the page's table."""
    device, module = DEVICES["h100"], named_model(model)
    workload = typical_workload(module, global_batch_size=SAMPLES[devices])
    costs = ModelledCosts(role_problems(module, workload, Cluster(device, devices, device.per_node)))
    try:
        choices = choose_plans(costs)
    except NoPlanError as refusal:
        return f"| {model} | {devices} | none: {str(refusal).split('; ')[1]} | | |"
    plan = choices.recommended.chosen
    anyway = choices.faster or plan
    runs = "" if why_plan_cannot_run(plan, costs.problems) is None else "**does not run yet**: "
    gain = plan.seconds / anyway.seconds - 1
    shown = gain > choices.recommended.margin
    faster = f". If every layout ran, {100 * gain:.0f} % faster: {words(anyway, devices)}" if shown else ""
    time = f"{plan.seconds:.3g} ({plan.seconds_low:.3g}-{plan.seconds_high:.3g})"
    return f"| {model} | {devices} | {runs}{words(plan, devices)}{faster} | {time} | {100 * plan.mfu:.0f} % |"


def words(plan: ModelledPlan, devices: int) -> str:
    """A plan in a cell, without what the heading says of all plans."""
    usual = (f"data {devices}", "fsdp")
    layouts = {
        role: ", ".join(part for part in one.layout.describe().split(", ") if part not in usual)
        for role, one in plan.chosen.items()
    }
    if len(set(layouts.values())) == 1:
        said = [next(iter(layouts.values()))]
    else:
        said = [f"{role} {layout}" for role, layout in layouts.items() if layout]
    recompute = "/".join(dict.fromkeys(one.recompute for one in plan.chosen.values()))
    placement = [] if plan.name == "uniform" else [plan.name]
    return "; ".join(part for part in (*placement, *said, recompute) if part)


def page() -> str:
    """All of it."""
    return HEADING + "".join(f"{row(model, devices)}\n" for model in MODELS for devices in SAMPLES) + REVIEWS


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
