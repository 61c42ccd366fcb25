"""The recommended plans of eight public models on 8 to 4,096 devices, as a page: ``python -m benchmarks.public_plans``.

Writes ``docs/public_plans.md``, with what was thought of each plan when it was reviewed by hand. That takes minutes.
After a change of the models of time or memory each plan is to be looked at again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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

_OFTEN = "Yes, usual on one node."
_GROUPS = "Yes: one ring over all ranks would cost more."
_LEAVES_ROOM = "Yes: less to recompute; two groups of 32 would exchange less."

REVIEWS: Mapping[str, tuple[str, ...]] = {
    "smolvlm-2.2b": (
        "Yes; whole copies with ZeRO-1 are usual too.",
        "Yes, in groups of two nodes; ZeRO-1 is as common.",
        "Yes; more samples than a step of 0.7 s has would hide more exchange.",
        "Yes, but few would give it 4,096 devices.",
    ),
    "qwen2.5-vl-7b": (_OFTEN, _GROUPS, _GROUPS, "Yes: with fewer samples, exchange would dominate."),
    "qwen2-audio-7b": (_OFTEN, _LEAVES_ROOM, _GROUPS, _GROUPS),
    "qwen3-vl-8b": (_OFTEN, _LEAVES_ROOM, _GROUPS, _GROUPS),
    "gemma-3-27b": (
        "Barely: 16 bytes a parameter take 55 of 80 GB. Adapters or two nodes are usual.",
        "Yes. With Megatron-LM, 4 tensor ranks and a short pipeline would gain little.",
        "Likewise.",
        "Likewise.",
    ),
    "qwen2.5-vl-72b": (
        "Right: 16 bytes a parameter are 1.2 TB, nearly twice their memory.",
        "It runs. With pipelines, tensor ranks in a node would be preferred.",
        "It runs. Megatron-LM's 4 tensor ranks and 8 stages are a little faster.",
        "Likewise.",
    ),
    "internvl3-78b": (
        "Right, as for 72B.",
        "Yes. Most would take 128 devices.",
        "It runs; 4 tensor ranks and 8 stages would be preferred.",
        "Likewise.",
    ),
    "qwen3-vl-30b-a3b": (
        "No: 16 bytes a parameter take 62 of 80 GB. Adapters or two nodes.",
        "It runs, but gathers all experts each microbatch; expert ranks are worth waiting for.",
        "Likewise.",
        "Likewise.",
    ),
}
"""Model -> for each number of devices: would a practitioner run it?"""

PAGE = Path(__file__).parents[1] / "docs/public_plans.md"

HEADING = """# Plans for eight public models

`flowtrain plan` recommends these on H100, 8 a node, in `bf16-mixed`, if everything trains, with microbatches of 8,192
tokens, [typical lengths](planning.md#what-it-reads), and 256, 512, 4,096 and 32,768 samples a step on 8, 64, 512 and
4,096 devices.

A plan is *uniform* with `fsdp` over all devices unless it says otherwise. It names replicas (HSDP groups), then what
encoder/backbone recompute. *If every layout ran* is faster by more than a tenth, and does not run yet. Written by
`python -m benchmarks.public_plans`; the reviews, by hand: would a practitioner run it?

| model | devices | plan | s/step (80 % band) | MFU | review |
|---|---|---|---|---|---|
"""


def row(model: str, devices: int) -> str:
    """The recommended plan as a line of the page's table, without the review."""
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
    reviewed = ((model, *one) for model, reviews in REVIEWS.items() for one in zip(SAMPLES, reviews, strict=True))
    return HEADING + "".join(f"{row(model, devices)} {review} |\n" for model, devices, review in reviewed)


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
