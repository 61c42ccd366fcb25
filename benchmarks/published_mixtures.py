"""Published throughputs of mixtures of experts beside the planner's: ``python -m benchmarks.published_mixtures``.

No coefficient was fitted to these rows. They are all that these sources list, not those that are missed by little:

- ``automodel``: NVIDIA-NeMo/Automodel, ``docs/performance-summary.mdx`` and ``examples/llm_benchmark`` at 36044ad.
- ``bridge``: NVIDIA-NeMo/Megatron-Bridge, ``docs/performance-summary.md`` and its archive at 067f987, recomputing as in
  ``perf_recipes``: each configuration once, in the latest release that has it.
- ``megatron``: NVIDIA/Megatron-LM, ``megatron/core/transformer/moe/README.md`` at 022bcb5: 468 TFLOP/s, full attention
  counted.
- ``zoo``: yanring/Megatron-MoE-ModelZoo, ``best_practice/qwen3`` at e865051: 750 TFLOP/s, in tokens as of ``bridge``,
  which says both.

Left out is what no layout of the planner is (experts divided over tensor ranks, latent attention, state spaces, 4
bits). What one source says of one configuration changes by up to 1.8 times from release to release.

Rows that are planned too short are those of kernels that are not fused and of hosts that wait. Release 25.09 of
``bridge`` drops tokens, so that its hosts know how many rows every expert gets; 25.11 drops none, in the same
configurations, and takes up to twice as long. Before 26.06 no row that drops none spends less than 7.9 ms on a layer
and microbatch, forward and backward, however fast its device is and however few its tokens are. Since then kernels are
fused and hosts do not wait, on Blackwell. How long hosts took is not published, so it is not planned.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attention_kernels import cudnn_share
from benchmarks.report import table
from flowtrain_lightning.allocator import BACKBONE, PRECISIONS, Cluster, Layout, RoleProblem, named_device
from flowtrain_lightning.allocator.coefficients import assumed_efficiency
from flowtrain_lightning.allocator.dimensions import backbone
from flowtrain_lightning.allocator.role_layout import Recompute, Sharding
from flowtrain_lightning.allocator.role_problem import Family, family_of
from flowtrain_lightning.allocator.role_time import batches, role_time
from flowtrain_lightning.allocator.workload import RoleLoad

ROWS = Path(__file__).with_name("published_mixtures.csv")

_QWEN3 = {"heads": 32, "key_value_heads": 4, "head_size": 128, "vocabulary": 151936}
_GPT_OSS = {"hidden": 2880, "heads": 64, "key_value_heads": 8, "head_size": 64, "vocabulary": 201088, "window": 128}

MODELS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    #                   layers, experts, of a token, inner width, and the rest
    "qwen3-30b-a3b": (48, 128, 8, 768, {**_QWEN3, "hidden": 2048}),
    "qwen3-235b-a22b": (94, 128, 8, 1536, {**_QWEN3, "hidden": 4096, "heads": 64}),
    "mixtral-8x7b": (32, 8, 2, 14336, {"hidden": 4096, "heads": 32, "key_value_heads": 8, "vocabulary": 32000}),
    "gpt-oss-20b": (24, 32, 4, 2880, {**_GPT_OSS, "full_layers": 12}),
    "gpt-oss-120b": (36, 128, 4, 2880, {**_GPT_OSS, "full_layers": 18}),
}
"""Model -> dimensions (``config.json`` on Hugging Face)."""

_MEGATRON = PRECISIONS["bf16-master"]
_FUSED_FLOAT8, _UNFUSED_FLOAT8 = replace(_MEGATRON, products=1), PRECISIONS["transformer-engine"]
"""What fp8 costs where casts, activations and copies for experts are fused, and where each is a kernel of its own."""

_FUSED_SINCE = "26.06"
"""Release of ``bridge`` whose kernels for experts are fused, on Blackwell, and ask no host how many rows there are
(NVIDIA, "Boosting MoE training throughput with advanced fusion kernels", June 2026)."""

_SENT_ONCE = ("automodel", "bridge", "zoo")
"""Sources whose dispatchers (DeepEP, HybridEP) send a token to each rank once."""


@dataclass(frozen=True)
class PublishedMixture:
    """One row of the table.

    Attributes:
        source: a name from above.
        model: a name in `MODELS`.
        precision: ``"bf16"`` or ``"fp8"``.
        what: the rest of the row in a few words.
        release: of ``bridge``; empty for others.
        fused: its kernels for experts are.
        drops: experts drop tokens that are too many for them.
        seconds: of a step, as published.
        problem: the row as a planner's problem.
        family: its layout.
        chunks: chunks of layers that every stage holds.
    """

    source: str
    model: str
    precision: str
    what: str
    release: str
    fused: bool
    drops: bool
    seconds: float
    problem: RoleProblem
    family: Family
    chunks: int

    @property
    def error(self) -> float:
        """By how much of the published time the predicted one is longer."""
        even = replace(self.family, cut="number")
        return float(role_time(self.problem, even, self.chunks).total[0]) / self.seconds - 1

    @property
    def of_a_layer(self) -> float:
        """Published seconds of a layer and microbatch, forward and backward, with what a step has beside them."""
        microbatches = float(batches(self.problem, self.family)[0][0])
        return self.seconds / microbatches / (self.problem.half.depth / self.family.pipeline)


def read_mixtures(path: Path = ROWS) -> list[PublishedMixture]:
    """All rows."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(file)]


def _row(row: dict[str, str]) -> PublishedMixture:
    number = {name: int(row[name]) for name in ("gpus", "pipeline", "chunks", "expert", "batch", "microbatch", "seq")}
    layers, count, chosen, inner, rest = MODELS[row["model"]]
    experts = {"count": count, "chosen": chosen, "feed_forward": inner, "sent_once": row["source"] in _SENT_ONCE}
    half = backbone(layers=layers, feed_forward=inner, experts=experts, gathered_logits=False, **rest)
    budget = number["microbatch"] * number["seq"]
    load = RoleLoad(
        np.array([number["seq"]]), number["batch"], budget, 1, forwards=number["batch"] // number["microbatch"]
    )
    device = named_device(row["device"])
    efficiency = replace(assumed_efficiency(device), attention=cudnn_share(half.layers[0].head_size))
    cluster = Cluster(device, number["gpus"], device.per_node)
    is_fused = row["release"] >= _FUSED_SINCE and device.name in ("b200", "gb200")
    precision = _MEGATRON if row["precision"] == "bf16" else _FUSED_FLOAT8 if is_fused else _UNFUSED_FLOAT8
    shard: Sharding = "fsdp" if row["shard"] == "fsdp" else "zero1"
    again: Recompute = "full" if row["recompute"] == "full" else "selective"
    again = "none" if row["recompute"] == "none" else again
    data = number["gpus"] // number["pipeline"]
    layout = Layout(data, pipeline=number["pipeline"], shard=shard, expert=number["expert"])
    return PublishedMixture(
        source=row["source"],
        model=row["model"],
        precision=row["precision"],
        what=f"{number['gpus']} {row['device']}, {layout.describe()}, {number['batch']} in {number['microbatch']}",
        release=row["release"],
        fused=is_fused,
        drops=row["drops"] == "yes",
        seconds=number["batch"] * number["seq"] / number["gpus"] / float(row["tokens_per_device"]),
        problem=RoleProblem(BACKBONE, half, load, False, cluster, precision, efficiency),
        family=family_of(layout, again),
        chunks=number["chunks"],
    )


def median_error(rows: Sequence[PublishedMixture]) -> float:
    """The median of the errors' sizes."""
    return float(np.median(np.abs([row.error for row in rows])))


def main() -> None:
    """Print all rows and the medians."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = read_mixtures()
    lines = [
        [
            f"{row.source} {row.release}{' drops' if row.drops else ''}",
            row.model,
            row.precision,
            row.what,
            f"{row.seconds:.2f} s",
            f"{1000 * row.of_a_layer:.1f} ms",
            f"{100 * row.error:+.1f} %",
        ]
        for row in rows
    ]
    print(table(["source", "model", "precision", "step", "published", "of a layer", "planned"], lines))
    groups: dict[str, list[PublishedMixture]] = {"no tokens dropped": [], "tokens dropped": [], "fused kernels": []}
    for row in rows:
        fused = ["fused kernels"] if row.fused else []
        for name in ["tokens dropped"] if row.drops else ["no tokens dropped", row.precision, row.model, *fused]:
            groups.setdefault(name, []).append(row)
    found = [
        [
            name,
            str(len(each)),
            f"{100 * median_error(each):.1f} %",
            f"{100 * np.median([row.error for row in each]):+.1f} %",
        ]
        for name, each in groups.items()
    ]
    print(f"\n{table(['', 'rows', 'median error', 'bias'], found)}")


if __name__ == "__main__":
    main()
