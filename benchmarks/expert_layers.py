"""CPU seconds of layers of experts on four ranks: experts divided among them beside whole experts under FSDP2.

python benchmarks/expert_layers.py            three sizes, in turns: some minutes
python benchmarks/expert_layers.py --quick    small layers, few turns, to see that it runs

Real layers compute, forward and backward, and real rows pass between processes of one machine, by gloo. Both begin with
the same weights and must give the same outputs. What is counted is user and system time of all ranks, which a busy
machine changes little; on GPUs products take far less of it, and links are others.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from benchmarks.launch import machine
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.parallel.experts.expert_parallel import EXPERT, divide_experts, experts_of, shard_experts
from flowtrain_lightning.parallel.experts.experts import Experts, grouped_product

DIVIDED, WHOLE = "divided", "whole"
RANKS = 4

_NAME = "expert-layers"
_LAYERS, _CHOSEN = 4, 2
_SETTINGS: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}


@dataclass(frozen=True)
class Size:
    """What is compared in one line.

    Attributes:
        width: of a row.
        inner: of an expert.
        experts: of a layer; a token passes two of them.
        tokens: of a rank's microbatch.
        turns: each contender takes so many, one after the other.
    """

    width: int
    inner: int
    experts: int
    tokens: int
    turns: int = 7

    @property
    def name(self) -> str:
        """In a few words."""
        return f"{self.experts} experts of {self.width} x {self.inner}, {self.tokens} tokens a rank"


SIZES = [Size(256, 512, 16, 256), Size(256, 512, 64, 256), Size(256, 512, 16, 1024)]


class _Experts(Experts):
    def __init__(self, size: Size) -> None:
        super().__init__(size.experts)
        self.widen = nn.Parameter(torch.randn(size.experts, size.inner, size.width) / size.width**0.5)
        self.narrow = nn.Parameter(torch.randn(size.experts, size.width, size.inner) / size.inner**0.5)

    def compute(self, rows: Tensor, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        return grouped_product(grouped_product(rows, weights["widen"], ends).relu(), weights["narrow"], ends)


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts)
        self.experts = _Experts(size)

    def forward(self, rows: Tensor) -> Tensor:
        scores = self.router(rows).softmax(dim=-1)
        chosen = self.experts.choose(scores, _CHOSEN)
        found: Tensor = rows + self.experts(rows, chosen, scores.gather(-1, chosen))
        return found


def build(size: Size, contender: str) -> nn.Sequential:
    """The layers, in shards over all ranks; experts divided among them, or in shards, too."""
    torch.manual_seed(1)
    layers = nn.Sequential(*(_Layer(size) for _ in range(_LAYERS)))
    ranks = torch.arange(dist.get_world_size())
    if contender == DIVIDED:
        mesh = DeviceMesh("cpu", ranks.view(1, -1), mesh_dim_names=("shard", EXPERT))
        experts = experts_of([layers])
        divide_experts(experts, mesh[EXPERT])
        shard_experts(experts, mesh["shard"], **_SETTINGS)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("shard",))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **_SETTINGS)
    fully_shard(layers, mesh=mesh, **_SETTINGS)
    return layers


def _rank(rank: int, ranks: int, size: Size, folder: str) -> None:
    """Takes turns as one of the ranks, and writes what they took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    stacks = {contender: build(size, contender) for contender in (DIVIDED, WHOLE)}
    torch.manual_seed(2 + rank)
    rows = torch.randn(size.tokens, size.width)
    spent: dict[str, list[float]] = {contender: [] for contender in stacks}
    for _ in range(1 + size.turns):
        outputs = {}
        for contender, stack in stacks.items():
            dist.barrier()
            before = _cpu_seconds()
            outputs[contender] = stack(rows)
            outputs[contender].square().mean().backward()
            spent[contender].append(_cpu_seconds() - before)
            stack.zero_grad(set_to_none=True)
        torch.testing.assert_close(outputs[DIVIDED], outputs[WHOLE], rtol=1e-4, atol=1e-4)
    own = torch.tensor([spent[contender][1:] for contender in (DIVIDED, WHOLE)])
    dist.all_reduce(own)
    if rank == 0:
        torch.save(own, Path(folder) / "spent.pt")
    dist.destroy_process_group()


def _cpu_seconds() -> float:
    taken = os.times()
    return taken.user + taken.system


def measure(size: Size) -> dict[str, Any]:
    """The median turn of each contender in CPU seconds of all ranks together, and the share of each turn's."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        torch.multiprocessing.spawn(_rank, (RANKS, size, folder), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]
        divided, whole = torch.load(Path(folder) / "spent.pt", weights_only=True).tolist()
    ratios = sorted(one / other for one, other in zip(divided, whole, strict=True))
    return {
        DIVIDED: median(divided),
        WHOLE: median(whole),
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "machine": machine(),
    }


def text(results: Mapping[str, Any]) -> str:
    """The table."""
    rows = [
        [
            name,
            f"{each[DIVIDED]:.2f}",
            f"{each[WHOLE]:.2f}",
            f"{each['ratio']:.2f} ({each['least']:.2f} to {each['most']:.2f})",
        ]
        for name, each in results.items()
    ]
    parts = [
        f"CPU seconds of {RANKS} ranks together for forward and backward of {_LAYERS} layers, two experts a token; "
        "medians of turns, and of their ratios (least to most).",
        table(["", "experts divided", "whole, FSDP2", "divided / whole"], rows),
        "\n".join(dict.fromkeys(machine_line(each["machine"]) for each in results.values())),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small layers, few turns; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for size in [Size(32, 32, 8, 16, turns=2)] if options.quick else SIZES:
        results[size.name] = measure(size)
        print(f"{size.name}: {results[size.name]}", flush=True)
        write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
