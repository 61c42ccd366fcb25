"""Plans in the words of somebody who rents the devices: what each role does, on how many of them, what starts it."""

from __future__ import annotations

from pathlib import Path

from flowtrain_lightning.allocator import Layout, Workload
from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems, RoleProblem
from flowtrain_lightning.placement.text_table import counted

_HELD = {
    "replicate": "whole weights on each",
    "zero1": "whole weights on each, optimizer states in shares (ZeRO-1)",
    "zero2": "whole weights on each, gradients and optimizer states in shares (ZeRO-2)",
    "zero3": "weights in shares (ZeRO-3)",
    "fsdp": "weights in shares (FSDP2)",
    "deepspeed-1": "whole weights on each, optimizer states in shares (DeepSpeed ZeRO-1)",
    "deepspeed-2": "whole weights on each, gradients and optimizer states in shares (DeepSpeed ZeRO-2)",
    "deepspeed-3": "weights in shares (DeepSpeed ZeRO-3)",
}

_PLACED = {
    "uniform": "every device has all roles, in one layout",
    "colocated": "every device has all roles, each in a layout of its own",
    "separate": "every device has one role",
    "mixed": "some devices only encode, the others do both",
}

_AGAIN = {
    "none": "",
    "selective": "norms and activations are computed again in the backward",
    "full": "every layer is computed again in the backward",
}

_SPLIT = {
    "zb-h1": "which make gradients of weights when they would wait (zb-h1)",
    "zb-v": "the first with both ends, which make gradients of weights when they would wait (zb-v)",
}

_ON_HOST = {
    "none": "",
    "weights": "weights, gradients and optimizer states lie in the host's memory",
    "optimizer": "optimizer states lie in the host's memory",
    "activations": "what the backward needs lies in the host's memory",
    "all": "weights and what the backward needs lie in the host's memory",
}


def placed_in_words(plan: ModelledPlan) -> str:
    """Says how the roles of a plan share its devices."""
    return "one role on every device" if len(plan.chosen) == 1 else _PLACED[plan.kind]


def candidate_in_words(candidate: Candidate) -> str:
    """A role's layout, and what it saves memory by."""
    saved = [_AGAIN[candidate.recompute], _ON_HOST[candidate.offload]]
    if candidate.activation_bytes is not None:
        given_up = "are moved to the host's memory" if candidate.offload == "activations" else "are computed again"
        saved = [f"batches whose activations find no room in {candidate.activation_bytes / 1e9:,.3g} GB {given_up}"]
    return "; ".join(filter(None, [_layout_in_words(candidate.layout), *saved]))


def _layout_in_words(layout: Layout) -> str:
    ranks = "1 device" if layout.ranks == 1 else f"{layout.ranks:,} devices"
    shared = [
        (layout.tensor, "every layer among {} (tensor)"),
        (
            layout.pipeline,
            "the layers among {} stages (pipeline)" + (", as many each" if layout.cut == "number" else ""),
        ),
        (layout.context, "every sequence among {} (context)"),
        (layout.expert_ranks if layout.expert > 1 else 1, "the experts among {} (expert)"),
    ]
    divided = [words.format(degree) for degree, words in shared if degree > 1]
    divided += [_SPLIT[layout.schedule]] if layout.stages.splits else []
    copies = f"{counted(layout.data, 'group')} with samples of their own" if divided and layout.data > 1 else ""
    held = _HELD[layout.shard] if layout.ranks > 1 else "whole weights"
    if layout.replicas > 1:
        held += f", in {layout.replicas} groups of which each has all"
    return ", ".join(filter(None, [ranks, copies, *divided, held]))


def tokens_in_words(problems: Problems) -> str:
    """Says what a step asks of every role."""
    return " and ".join(f"{problem.load.tokens:,.0f} tokens of the {role}" for role, problem in problems.items())


def next_command(plan: ModelledPlan, backbone: RoleProblem, file: Path | None, workers: int, workload: Workload) -> str:
    """The command that trains on a plan, by a configuration of the user's own.

    Steps there are as planned: they fill as many microbatches, or have as many samples.

    Args:
        plan: that training runs.
        backbone: what is known of its role.
        file: where the plan was written; None where it was not.
        workers: processes that load for each rank.
        workload: says how encoder batches are bounded.
    """
    path = Path("plan.yaml") if file is None else file
    nodes = plan.nodes(backbone.cluster.per_node) or 1
    load = backbone.load
    size = f"--data.token_steps.microbatches={load.forwards}"
    if load.forwards is None:
        size = f"--data.global_batch_size={round(load.items)}"
    options = [
        f"--trainer.devices={plan.devices // nodes}",
        *([f"--trainer.num_nodes={nodes}"] if nodes > 1 else []),
        f"--trainer.precision={backbone.precision.name}",
        "--trainer.strategy=flowtrain_lightning.FlowTrainStrategy",
        f"--trainer.strategy.allocation={path}",
        size,
        f"--data.token_budget={load.budget}",
        *_unless_usual("--data.", workload, "encoder_budget"),
        *([f"--data.num_workers={workers}"] if workers else []),
    ]
    before = f"`--out {path}` writes the plan; then\n" if file is None else ""
    after = "\non every node, as recipes/several_nodes starts it" if nodes > 1 else ""
    return f"{before}  flowtrain fit --config config.yaml {' '.join(options)}{after}"


def _unless_usual(prefix: str, workload: Workload, name: str) -> list[str]:
    """The option that sets a field of the workload, where it is not what training takes by itself."""
    value = getattr(workload, name)
    return [] if value == getattr(Workload, name) else [f"{prefix}{name}={value}"]
