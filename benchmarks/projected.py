"""Plans for large models, and the memory of their ranks: what the planner says, beside what is counted.

python benchmarks/projected.py                            Qwen2.5-VL 7B, 32B and 72B on 8, 64 and 512 H100
python benchmarks/projected.py --models qwen2.5-vl-7b --devices 8     some of them; other results are kept

Counting needs no device, see `benchmarks/memory_count.py`: some seconds for each role of a 7B, minutes for a 72B.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AutoConfig

from benchmarks.launch import machine
from benchmarks.memory_count import count_batch, count_states
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import PackedBatch, PackedMedia
from flowtrain_lightning.allocator import (
    Cluster,
    ModelledCosts,
    NoPlanError,
    RoleProblem,
    named_device,
    named_model,
    role_problems,
    typical_workload,
)
from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.division import share_of_rank
from flowtrain_lightning.allocator.memory_use import memory_use
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.cli.plan_choice import choose_plans, why_plan_cannot_run
from flowtrain_lightning.models import QwenVLM

MODELS = ("qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b")
DEVICES = (8, 64, 512)
PRECISION = "bf16-mixed"

_NEAR = 0.1  # the aim: share by which planned bytes may differ from counted ones
_PER_NODE = 8
_SAMPLE_TOKENS = 1024
_SIDE = 32  # of an image, in patches: 1,024 patches, 256 rows of features
_MERGE = 2
_TOKEN_IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_TEXT_ID = 9


@dataclass(frozen=True)
class RoleBytes:
    """Bytes of one rank for one role, counted or planned.

    Attributes:
        weights: its shard or copy of the weights.
        gradients: of these.
        optimizer: two moments of these.
        gathered: of other ranks' shards what is there at most, and gradients on their way; casts of whole copies.
        batch: what the largest batches keep and work with, logits included.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    batch: float

    @property
    def total(self) -> float:
        """For all purposes."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def cells(self) -> dict[str, float]:
        """Purpose -> bytes, and their sum."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "total": self.total}


def main() -> None:
    """Plan, count, print, and write the results."""
    options = _parse()
    file = options.out / "projected.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in options.models:
        for devices in options.devices:
            text, found = _projected(name, devices, options.batch or max(256, 4 * devices))
            print(f"\n{text}", flush=True)
            results[f"{name} on {devices}"] = {**found, "text": text, "machine": machine()}
            write_results(options.out, "projected", results, results_text(results))
    print(f"Written to {options.out}.")


def results_text(results: Mapping[str, Any]) -> str:
    """All runs: totals of a rank, what is planned badly, every plan by purpose."""
    machines = dict.fromkeys(machine_line(run["machine"]) for run in results.values())
    rows, late = [], []
    for name, run in results.items():
        roles = run.get("roles", {})
        totals = (
            f"{each['counted']['total'] / 1e9:.2f} / {each['planned']['total'] / 1e9:.2f}" for each in roles.values()
        )
        rows.append([name, *totals] if roles else [name, "-", "-"])
        for role, each in roles.items():
            for purpose, counted in each["counted"].items():
                if abs(each["planned"][purpose] - counted) > _NEAR * counted:
                    late.append(
                        f"{name}, {role}: {purpose} ({each['planned'][purpose] / 1e9:.2f} of {counted / 1e9:.2f})"
                    )
    grid = table(["GB of a rank, counted / planned", "encoder", "backbone"], rows)
    near = f"Planned within {_NEAR:.0%} of the count: all" + (f" but {'; '.join(late)}." if late else ".")
    return "\n\n".join([grid, near, *(run["text"].strip() for run in results.values()), "\n".join(machines)]) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, choices=[name for name in CONFIGS if name.startswith("qwen")]
    )
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES, help="numbers of H100, 8 a node")
    parser.add_argument("--batch", type=int, help="samples of a step (default: 4 a device, at least 256)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


def _projected(name: str, devices: int, samples: int) -> tuple[str, dict[str, Any]]:
    """The plan in words and its memory as a table; and both as values."""
    module = named_model(name)
    workload = typical_workload(module, global_batch_size=samples)
    problems = role_problems(module, workload, Cluster(named_device("h100"), devices, _PER_NODE), PRECISION)
    heading = f"**{name} on {devices} H100, {samples} samples a step:**"
    try:
        plan: ModelledPlan = choose_plans(ModelledCosts(problems)).recommended.chosen
    except NoPlanError as refusal:
        return f"{heading} {refusal}\n", {"refused": str(refusal)}
    layouts = "; ".join(
        f"{role} {one.layout.describe()}, recomputing {one.recompute}" for role, one in plan.chosen.items()
    )
    said = f"{heading} {plan.name} ({layouts}), {plan.seconds:.2f} s a step, {100 * plan.mfu:.0f} % MFU."
    if (reason := why_plan_cannot_run(plan, problems)) is not None:
        return f"{said} Training does not run it: it {reason}\n", {"plan": said, "refused": reason}
    if any(one.layout.context > 1 for one in plan.chosen.values()):
        reason = "has ranks that share sequences, whose memory cannot be counted here."
        return f"{said} It {reason}\n", {"plan": said, "refused": reason}
    rows, found = [], {}
    for role, candidate in plan.chosen.items():
        planned, counted = role_bytes(name, problems[role], candidate)
        found[role] = {"planned": planned.cells(), "counted": counted.cells()}
        for (purpose, said_bytes), found_bytes in zip(planned.cells().items(), counted.cells().values(), strict=True):
            ratio = f"{said_bytes / found_bytes:.2f}" if found_bytes else "-"
            rows.append([f"{role}: {purpose}", f"{found_bytes / 1e9:.2f}", f"{said_bytes / 1e9:.2f}", ratio])
    grid = table(["GB of a rank", "counted", "planned", "planned / counted"], rows)
    return f"{said}\n\n{grid}", {"plan": said, "roles": found}


def role_bytes(name: str, problem: RoleProblem, candidate: Candidate) -> tuple[RoleBytes, RoleBytes]:
    """What a rank of a role holds by the planner, and by counting, for the same largest batch.

    Args:
        name: of a public Qwen-VL.
        problem: the role.
        candidate: its layout.
    """
    details = candidate.details(problem)
    sharded = details.family.sharded
    largest = min(problem.load.budget, max(1.25 * float(details.time.tokens[0]), float(problem.load.lengths.max())))
    items = max(1, round(largest / _SAMPLE_TOKENS))  # a sample and an image have as many tokens
    memory = memory_use(problem, details.family, np.array([items * 1024.0]), details.time.microbatches).at(0)
    half, precision = problem.half, problem.precision
    here = share_of_rank(half, candidate.layout.tensor)
    weights = here * half.parameters * precision.weights * float(details.family.kept_share("weights")[0])
    gradients = (
        here * half.trainable_parameters * precision.gradients * float(details.family.kept_share("gradients")[0])
    )
    planned = RoleBytes(
        weights,
        gradients,
        memory["states"],
        memory["weights"] - weights + memory["gradients"] - gradients,
        memory["activations"] + memory["logits"],
    )
    states = count_states(_module(name), problem.role, candidate.layout, candidate.recompute, PRECISION)
    batch = count_batch(
        _module(name),
        problem.role,
        full_microbatch(items),
        full_media(items, AutoConfig.for_model(**CONFIGS[name]).vision_config.patch_size),
        sharded=sharded,
        recompute=candidate.recompute,
        tensor=candidate.layout.tensor,
    )
    others = min(float(details.time.microbatches[0]), problem.batches_in_flight) - 1
    kept = max(0.0, others) * batch.saved
    in_backward, at_its_end = (
        RoleBytes(states.weights, states.gradients, states.optimizer, gathered + batch.weight_copies, of_batches)
        for gathered, of_batches in ((states.gathered, kept + batch.peak), (states.gathered_at_the_end, kept))
    )
    return planned, max(in_backward, at_its_end, key=lambda use: use.total)


def _module(name: str) -> QwenVLM:
    return QwenVLM({**CONFIGS[name], **_TOKEN_IDS})


def full_microbatch(samples: int) -> PackedBatch:
    """Samples of 1,024 tokens, each with an image; every token is a target."""
    tokens, rows = samples * _SAMPLE_TOKENS, (_SIDE // _MERGE) ** 2
    starts = torch.arange(samples) * _SAMPLE_TOKENS
    return PackedBatch(
        tokens=torch.full((tokens,), _TEXT_ID),
        labels=torch.full((tokens,), _TEXT_ID),
        position_ids=torch.arange(tokens) % _SAMPLE_TOKENS,
        cu_seqlens=torch.arange(samples + 1, dtype=torch.int32) * _SAMPLE_TOKENS,
        max_seqlen=_SAMPLE_TOKENS,
        media_positions={"image": (starts[:, None] + torch.arange(rows)).flatten()},
        samples=tuple(range(samples)),
        targets=torch.arange(tokens),
    )


def full_media(images: int, patch: int = 14) -> PackedMedia:
    """Images of 1,024 patches of so many pixels a side, without the pixels."""
    patches = _SIDE**2
    return PackedMedia(
        modality="image",
        pixels=torch.empty(images * patches, 3 * patch**2, device="meta"),
        cu_seqlens=torch.arange(images + 1, dtype=torch.int32) * patches,
        grid=torch.full((images, 2), _SIDE),
        max_seqlen=patches,
        rows=(patches // _MERGE**2,) * images,
    )


if __name__ == "__main__":
    main()
