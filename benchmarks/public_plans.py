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

_OFTEN = "Yes: the usual way to train this size on one node."
_GROUPS = "Yes: groups of nodes (HSDP), for a ring over all ranks would cost more than it saves."

REVIEWS: Mapping[str, tuple[str, ...]] = {
    "smolvlm-2.2b": (
        "Yes: shards, or whole copies with sharded states (ZeRO-1), are usual at this size.",
        "Yes, in groups of two nodes; whole copies with sharded states are as common at this size.",
        "Likewise. A step of 0.7 s is short: more samples would hide more of the exchange.",
        "Likewise; few would give so small a model 4,096 devices.",
    ),
    "qwen2.5-vl-7b": (_OFTEN, _GROUPS, _GROUPS, "Yes. 8 samples a device, or the exchange would dominate."),
    "qwen2-audio-7b": (
        _OFTEN,
        "Yes: shards over all ranks leave room to recompute less; two groups of 32 would save some of the exchange.",
        _GROUPS,
        _GROUPS,
    ),
    "qwen3-vl-8b": (
        _OFTEN,
        "Yes: shards over all ranks leave room to recompute less; two groups of 32 would save some of the exchange.",
        _GROUPS,
        _GROUPS,
    ),
    "gemma-3-27b": (
        "It runs, but barely: 16 bytes a parameter alone take 55 of 80 GB on each device. People take adapters, or two "
        "nodes.",
        "Yes without tensor ranks. Megatron-LM's users would take 4 tensor ranks and a short pipeline, and gain "
        "little.",
        "Yes, likewise.",
        "Yes, likewise.",
    ),
    "qwen2.5-vl-72b": (
        "Right: 16 bytes for each of 73 billion parameters are 1.2 TB, nearly twice what eight cards have.",
        "It runs, with everything recomputed. With pipelines, tensor ranks in a node would be preferred.",
        "It runs; 4 tensor ranks and 8 stages are what people with Megatron-LM run, and a little faster.",
        "Likewise.",
    ),
    "internvl3-78b": (
        "Right, as for the 72B model.",
        "Yes: shards alone, with everything recomputed. Most would take 128 devices.",
        "It runs; a backbone in 4 tensor ranks and 8 stages would be preferred.",
        "Likewise.",
    ),
    "qwen3-vl-30b-a3b": (
        "Nobody would: 16 bytes a parameter take 62 of 80 GB on each device. Adapters, or two nodes.",
        "It runs as dense models do, but gathers all experts for each microbatch: expert ranks are worth waiting for.",
        "Likewise.",
        "Likewise.",
    ),
}
"""Model -> for each number of devices: would a practitioner run it?"""

PAGE = Path(__file__).parents[1] / "docs/public_plans.md"

HEADING = """# Plans for eight public models

What `flowtrain plan` recommends on H100, 8 a node, in `bf16-mixed`, where everything trains, with microbatches of 8,192
tokens and [typical lengths](planning.md#what-it-reads): 256, 512, 4,096 and 32,768 samples a step on 8, 64, 512 and
4,096 devices. *If every layout ran* is the best plan of all where it is faster by more than a tenth; training does not
run it yet. Written by `python -m benchmarks.public_plans`; the reviews are by hand.

| model | devices | recommended | s/step (80 % band) | MFU | if every layout ran | would a practitioner run it? |
|---|---|---|---|---|---|---|
"""


def row(model: str, devices: int) -> str:
    """The recommended plan as a line of the page's table, without the review."""
    device, module = DEVICES["h100"], named_model(model)
    workload = typical_workload(module, global_batch_size=SAMPLES[devices])
    costs = ModelledCosts(role_problems(module, workload, Cluster(device, devices, device.per_node)))
    try:
        choices = choose_plans(costs)
    except NoPlanError as refusal:
        return f"| {model} | {devices} | none: {str(refusal).split('; ')[1]} | | | |"
    plan = choices.recommended.chosen
    anyway = choices.faster or plan
    runs = "" if why_plan_cannot_run(plan, costs.problems) is None else "**does not run yet**: "
    gain = plan.seconds / anyway.seconds - 1
    faster = f"{100 * gain:.0f} %: {words(anyway)}" if gain > choices.recommended.margin else ""
    time = f"{plan.seconds:.3g} ({plan.seconds_low:.3g} to {plan.seconds_high:.3g})"
    return f"| {model} | {devices} | {runs}{words(plan)} | {time} | {100 * plan.mfu:.0f} % | {faster} |"


def words(plan: ModelledPlan) -> str:
    """A plan in a cell."""
    layouts = {role: f"{one.layout.describe()}, recompute {one.recompute}" for role, one in plan.chosen.items()}
    if len(set(layouts.values())) == 1:
        return f"{plan.name}; {next(iter(layouts.values()))}"
    return "; ".join([plan.name, *(f"{role} {layout}" for role, layout in layouts.items())])


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
