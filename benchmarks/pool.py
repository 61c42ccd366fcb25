"""How fast a tensor gets from one process to others: through the pool, beside its peers and beside memcpy.

python benchmarks/pool.py                  all sizes and readers, idle and busy cores: about two minutes
python benchmarks/pool.py --quick          few samples, to see that it runs
chrt -r 1 python benchmarks/pool.py        as root, where other programs use the cores too

Every sample of every way is taken in turn with those of all others, in the same processes; ratios are medians of the
ratios of such neighbours. A reader sleeps when the owner begins; the owner has slept for a millisecond or, where
the tables say so, worked. Times run from there until the last reader has a
tensor, processor time is that of all processes until the entry is given back. memcpy is the C library's, by one thread,
into shared memory of the kind that the pool has.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process

import numpy as np
import torch

from benchmarks.launch import machine
from benchmarks.modules import ROOT
from benchmarks.pool_device import measure_device
from benchmarks.pool_peers import Way, free_port, open_ways
from benchmarks.pool_report import draw_ways, report
from benchmarks.pool_wakeups import answer, pause, wake_up_seconds, wakers
from benchmarks.report import write_results
from flowtrain_lightning.pool import create_memory, map_memory

KIB, MIB = 1 << 10, 1 << 20
SAMPLES = {4 * KIB: 300, 64 * KIB: 200, MIB: 100, 16 * MIB: 30, 64 * MIB: 12}
"""Bytes -> how many samples."""

READERS = (1, 2, 4)
BUSY_PROCESSES = 2
STREAMED = 4 * KIB
WAITING_SECONDS = 2.0
FORK: Any = multiprocessing.get_context("fork")


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    few = 20 if options.quick else 1
    where = machine()
    runs: list[dict[str, Any]] = []
    for cores in ("idle", "busy"):
        hogs = [FORK.Process(target=hog, daemon=True) for _ in range(BUSY_PROCESSES if cores == "busy" else 0)]
        for process in hogs:
            process.start()
        try:
            runs += [{"cores": cores, **figures} for figures in measure_ways(few, READERS if cores == "idle" else (1,))]
            runs += [{"cores": cores, **figures} for figures in measure_wakeups(max(500 // few, 20))]
        finally:
            for process in hogs:
                process.kill()
                process.join()
    if torch.cuda.device_count():  # last, since a process that has used CUDA cannot be forked
        runs += measure_device(max(100 // few, 5))
    results = {"machine": where, "runs": runs}
    print(report(results))
    options.out.mkdir(parents=True, exist_ok=True)
    draw_ways(options.out / "pool.png", runs)
    write_results(options.out, "pool", results, report(results))
    print(f"Written to {options.out}.")


def hog() -> None:
    """Keeps a core busy, at the priority of an ordinary program."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    while True:
        pass


def measure_ways(few: int, readers: Sequence[int]) -> list[dict[str, Any]]:
    """Figures of every way, size and number of readers."""
    ranks, sizes = max(readers) + 1, SAMPLES
    context = torch.multiprocessing.get_context("fork")
    queues = [context.Queue() for _ in range(1, ranks)]
    pipes = [FORK.Pipe() for _ in range(1, ranks)]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        common = (ranks, Path(folder), port, queues, max(sizes))
        children = [FORK.Process(target=read, args=(r, *common, pipes[r - 1][1]), daemon=True) for r in range(1, ranks)]
        for child in children:
            child.start()
        try:
            ways = open_ways(0, *common)
            ends = [near for near, _ in pipes]
            runs = [
                {"bytes": size, "readers": count, **figures}
                for count in readers
                for size in sizes
                for figures in measure_size(ways, ends[:count], size, max(sizes[size] // few, 2))
            ]
            names = [name for name in ways if name != "torch.multiprocessing.Queue"]  # whose thread sends when it likes
            busy = {name: ways[name] for name in names}
            for size in sizes:
                hot = measure_size(busy, ends[:1], size, max(sizes[size] // few, 2), idle=False)
                runs += [{"size": size, **figures, "way": "hot", "of": figures["way"]} for figures in hot]
            runs += measure_stream(ways["pool"], ends[0], max(200 // few, 5))
            runs.append(measure_waiting(ends[0]))
            for end in ends:
                end.send(None)
            for way in ways.values():
                way.close()
            for child in children:
                child.join(10)
        finally:
            for child in children:
                child.kill()
    return runs


def read(rank: int, ranks: int, folder: Path, port: int, queues: Any, most_bytes: int, pipe: Any) -> None:
    """A reader: takes what it is told to take, and says when it had it and what that cost."""
    ways = open_ways(rank, ranks, folder, port, queues, most_bytes)
    while (told := pipe.recv()) is not None:
        name, turns, nbytes, checked = told
        way, had, cpu = ways[name], 0, time.process_time()
        if not turns:
            way._pool.poll(nbytes)  # type: ignore[attr-defined]  # seconds: only waits
        for turn in turns:
            tensor = way.receive(turn, nbytes)
            had = time.monotonic_ns()
            assert not checked or tensor[-1] == turn % 251, "wrong bytes"
            del tensor
            way.finish(turn)
        pipe.send((had, time.process_time() - cpu))
    for way in ways.values():
        way.close()
    os._exit(0)  # without the farewells of gloo's threads


def measure_size(
    ways: dict[str, Way], ends: Sequence[Any], nbytes: int, samples: int, idle: bool = True
) -> list[dict[str, Any]]:
    """All ways at one size, in turn."""
    tensor, target = torch.zeros(nbytes, dtype=torch.uint8), shared_bytes(nbytes)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    names = [name for name, way in ways.items() if nbytes <= way.most_bytes]
    for _ in range(samples + 2):
        pause(idle)
        start = time.perf_counter()
        ctypes.memmove(target.data_ptr(), tensor.data_ptr(), nbytes)
        seconds["memcpy", "put"].append(time.perf_counter() - start)
        for name in names:
            turn = next(TURNS)
            tensor[-1] = turn % 251
            for end in ends:
                end.send((name, (turn,), nbytes, True))
            pause(idle)
            cpu, start_ns = time.process_time(), time.monotonic_ns()
            ways[name].send(turn, tensor, len(ends))
            sent_ns = time.monotonic_ns()
            if name == "pool":  # which waits for its readers by itself; others let go only when they have answered
                ways[name].finish(turn)
            cpu = time.process_time() - cpu
            answers = [end.recv() for end in ends]
            if name != "pool":
                ways[name].finish(turn)
            seconds[name, "put"].append((sent_ns - start_ns) / 1e9)
            seconds[name, "there"].append((max(had for had, _ in answers) - start_ns) / 1e9)
            seconds[name, "cpu"].append(cpu + sum(used for _, used in answers))
    kept = {key: np.array(values[2:]) for key, values in seconds.items()}
    figures = [{"way": "memcpy", "put_us": 1e6 * float(np.median(kept["memcpy", "put"]))}]
    for name in names:
        there = kept[name, "there"]
        figures.append(
            {
                "way": name,
                "put_us": 1e6 * float(np.median(kept[name, "put"])),
                "there_us": 1e6 * float(np.median(there)),
                "there_p99_us": 1e6 * float(np.percentile(there, 99)),
                "cpu_us": 1e6 * float(np.median(kept[name, "cpu"])),
                "put_over_memcpy": float(np.median(kept[name, "put"] / kept["memcpy", "put"])),
                "there_over_pool": float(np.median(there / kept["pool", "there"])),
            }
        )
    return figures


def measure_stream(way: Way, end: Any, rounds: int) -> list[dict[str, Any]]:
    """Entries that are put one after another: processor time of put, get and release, and the time of puts alone."""
    runs = []
    tensor = torch.zeros(STREAMED, dtype=torch.uint8)
    for burst in (1, 16, 64):
        costs, puts, copies = [], [], []
        shared = shared_bytes(burst * STREAMED)
        targets = [shared[start : start + STREAMED] for start in range(0, len(shared), STREAMED)]
        for _ in range(max(rounds // burst, 5) + 3):
            turns = [next(TURNS) for _ in range(burst)]
            start = time.perf_counter()
            for target in targets:
                ctypes.memmove(target.data_ptr(), tensor.data_ptr(), STREAMED)
            copies.append((time.perf_counter() - start) / burst)
            end.send(("pool", turns, STREAMED, False))
            cpu, start = time.process_time(), time.perf_counter()
            for turn in turns:
                way.send(turn, tensor, 1)
            puts.append((time.perf_counter() - start) / burst)
            way.finish(turns[-1])
            own = time.process_time() - cpu
            costs.append((own + end.recv()[1]) / burst)
        medians = {"cpu_us": costs, "put_us": puts, "copy_us": copies}
        figures = {name: 1e6 * float(np.median(values[3:])) for name, values in medians.items()}
        runs.append({"way": "stream", "burst": burst, **figures})
    return runs


def shared_bytes(nbytes: int) -> torch.Tensor:
    """Memory of the kind that the pool has."""
    descriptor = create_memory("flowtrain benchmark", nbytes)
    try:
        return torch.frombuffer(map_memory(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def measure_waiting(end: Any) -> dict[str, Any]:
    """The share of a core that a reader takes while it waits for nothing."""
    end.send(("pool", (), WAITING_SECONDS, False))
    return {"way": "waiting", "share": end.recv()[1] / WAITING_SECONDS}


def measure_wakeups(samples: int) -> list[dict[str, Any]]:
    """How long each mechanism takes to wake a process."""
    made, (near, far) = wakers(), FORK.Pipe()
    child = FORK.Process(target=answer, args=(made, far), daemon=True)
    child.start()
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    try:
        for _ in range(samples):
            for name, waker in made.items():
                for idle in (True, False):
                    seconds[name, idle].append(wake_up_seconds(waker, name, near, idle))
        near.send(None)
        child.join(10)
    finally:
        child.kill()
    return [
        {
            "way": "wake-up",
            "waker": name,
            "idle_before": idle,
            "median_us": 1e6 * float(np.median(values)),
            "p99_us": 1e6 * float(np.percentile(values, 99)),
        }
        for (name, idle), values in seconds.items()
    ]


def _turns() -> Any:
    turn = 0
    while True:
        turn += 1
        yield turn


TURNS = _turns()

if __name__ == "__main__":
    main()
