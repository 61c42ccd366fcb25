"""How fast hidden states get from one stage to the next: through the pool, beside a process group's point-to-point.

python benchmarks/activations.py            20 rounds of both at each size: about two minutes on two idle cores
python benchmarks/activations.py --quick    one round, to see that it runs

Two processes of one thread each pass tensors as stages do: one way, or both ways at once, since gradients go back while
hidden states go on. The group is gloo's, with `batch_isend_irecv` as in `torch.distributed.pipelining`. In either, two
messages may be under way. The pool's reader takes each entry where it lies and gives it back. A round is some messages
by each, in turns; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.launch import launch, machine
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.pool import Key, Mesh, Pool, entry_nbytes

POOL, GROUP = "pool", "gloo"
MIB = 1 << 20
MESSAGES = {1 * MIB: 64, 16 * MIB: 12, 64 * MIB: 4}
"""Bytes of a message -> how many a round has."""

BOTH, ONE = "both ways", "one way"
UNDER_WAY = 2
_DEADLINE = 600.0


@dataclass(frozen=True)
class Job:
    """What one run does.

    Attributes:
        folder: where the ranks meet, and write what they measured.
        rounds: of every size and direction.
    """

    folder: Path
    rounds: int


class Way(Protocol):
    """Passes tensors between two ranks."""

    def run(self, tensor: Tensor, count: int, *, sends: bool, receives: bool) -> None:
        """Passes so many, and returns when they are there. Both ranks call it, one of them for the other direction."""


class PoolWay:
    """Entries that the other rank reads where they lie."""

    def __init__(self, mesh: Mesh, most_bytes: int) -> None:
        self._pool = Pool.open(mesh, UNDER_WAY * entry_nbytes([most_bytes]), 0)
        self._rank, self._number = mesh.rank, 0

    def run(self, tensor: Tensor, count: int, *, sends: bool, receives: bool) -> None:
        """See `Way`."""
        sent, read, first = count * (not sends), count * (not receives), self._number
        while sent < count or read < count:
            if sent < count and self._put(Key(self._rank, first + sent, 0), tensor):
                sent += 1
                continue
            lease = self._pool.get(Key(1 - self._rank, first + read, 0)) if read < count else None
            if lease is None:
                self._pool.poll(1.0)
                continue
            assert len(lease.tensors[0]) == len(tensor)
            lease.release()
            read += 1
        self._number += count

    def _put(self, key: Key, tensor: Tensor) -> bool:
        return self._pool.put(key, [tensor], [1 - self._rank]) is not None


class GroupWay:
    """Point-to-point of the default group, into tensors of the receiver's."""

    def __init__(self, rank: int, most_bytes: int) -> None:
        self._other = 1 - rank
        self._into = [torch.zeros(most_bytes, dtype=torch.uint8) for _ in range(UNDER_WAY)]

    def run(self, tensor: Tensor, count: int, *, sends: bool, receives: bool) -> None:
        """See `Way`."""
        waiting: list[list[Any]] = []
        for number in range(count):
            if len(waiting) == UNDER_WAY:
                _wait(waiting.pop(0))
            into = self._into[number % UNDER_WAY][: len(tensor)]
            ops = [dist.P2POp(dist.isend, tensor, self._other)] * sends
            ops += [dist.P2POp(dist.irecv, into, self._other)] * receives
            waiting.append(dist.batch_isend_irecv(ops))
        for works in waiting:
            _wait(works)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def measure(job: Job) -> None:
    """What one rank does: rank 0 hands on, and rank 1 gives back where both ways are measured."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    mesh = Mesh.connect(FileStore(str(job.folder / "mesh"), 2), rank, 2, ["stage 0", "stage 1"])
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/group", rank=rank, world_size=2)
    ways: dict[str, Way] = {POOL: PoolWay(mesh, max(MESSAGES)), GROUP: GroupWay(rank, max(MESSAGES))}
    found = []
    for size, count in MESSAGES.items():
        tensor = torch.ones(size, dtype=torch.uint8)
        for direction in (ONE, BOTH):
            turns = {"sends": rank == 0 or direction == BOTH, "receives": rank == 1 or direction == BOTH}
            for number in range(-1, job.rounds):  # the first does not count
                for name, way in ways.items():
                    dist.barrier()
                    cpu, start = time.process_time(), time.perf_counter()
                    way.run(tensor, count, **turns)
                    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
                    if number >= 0:
                        found.append({"way": name, "bytes": size, "direction": direction, "s": seconds, "cpu": cpu})
    (job.folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Both ranks' figures as one: the longer time, and the CPU time of both."""
    both = (json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2))
    return [
        {**one, "s": max(one["s"], two["s"]), "cpu": one["cpu"] + two["cpu"]} for one, two in zip(*both, strict=True)
    ]


def text(results: dict[str, Any]) -> str:
    """The table: bandwidth and CPU time of both, and the ratio of the pool's to the group's."""
    rows = []
    for size, count in MESSAGES.items():
        for direction in (ONE, BOTH):
            of_ways = [
                [
                    run
                    for run in results["runs"]
                    if (run["way"], run["bytes"], run["direction"]) == (way, size, direction)
                ]
                for way in (POOL, GROUP)
            ]
            row = [f"{size // MIB} MiB, {direction}"]
            for name, unit in (("s", "GB/s"), ("cpu", "ms")):
                pool, group = ([run[name] for run in runs] for runs in of_ways)
                ratio = statistics.median(one / other for one, other in zip(pool, group, strict=True))
                for values in (pool, group):
                    each = statistics.median(values) / count
                    row.append(f"{size / each / 1e9:.2f} {unit}" if name == "s" else f"{each * 1e3:.2f} {unit}")
                row.append(f"{1 / ratio if name == 's' else ratio:.2f}")
            rows.append(row)
    head = ["message", POOL, GROUP, "bandwidth, ratio", f"CPU time, {POOL}", f"CPU time, {GROUP}", "ratio"]
    said = (
        f"Hidden states from stage to stage of one host, {results['rounds']} rounds in turns; medians. Bandwidth is "
        "bytes one way over time; CPU time is that of both processes for a message one way, or for one each way."
    )
    return "\n\n".join([said, table(head, rows), machine_line(results["machine"])]) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    results: dict[str, Any] = {"machine": machine(), "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        launch(measure, Job(Path(temporary), rounds), 2, Path(temporary), _DEADLINE)
        results["runs"] = runs_of(Path(temporary))
    write_results(options.out, "activations", results, text(results))
    print(f"{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
