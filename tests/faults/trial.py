"""One trial of the campaign: a fault drawn from a seed, what it does to a job, and whether the job then goes on."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.fault import Fault
from tests.faults.forks import run_forked
from tests.faults.job import DEADLINE, Job
from tests.faults.train import STEPS
from tests.faults.verdict import (
    HANG_TIMEOUT,
    LABELS,
    assert_all_ended,
    assert_all_told,
    assert_healthy,
    assert_told_of_data,
    assert_told_of_network,
    named,
    settings_for,
)
from tests.hosts import Hosts, why_not
from tests.pool.faults import slowness
from tests.tiny import write_records

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole copies": {},
    "fsdp": {"roles": {"backbone": {"shard": "fsdp"}}},
    "tensor": {"roles": {"backbone": {"tensor": 2}}},
    "context": {"roles": {"backbone": {"context": 2}}},
}
"""Name -> arguments of the strategy, for two backbone ranks and an encoder rank."""

PLACES = {
    **dict.fromkeys(("kill", "stop"), ("build", "train", "wait", "between", "validation", "save", "anywhere")),
    "raise": ("build", "train", "between", "validation", "save"),
    **dict.fromkeys(("exit", "vanish", "loop", "sleep", "hold", "kill worker", "stop worker"), ("train", "between")),
    "full disk": ("save",),
    "no memory": ("train", "between", "validation", "save"),
    "wrong data": ("between",),
    "clock jump": ("build", "train", "between", "save"),
    "lost network": ("train", "between", "validation", "save"),
}
"""Kind of fault -> where it may happen."""

MOMENTS = {"build": (0,), "train": range(STEPS), "validation": (2, 4), "save": (2, 4), "anywhere": (0,)}
"""Place -> steps; anywhere else from the second on, so that something runs already."""

_PATIENCE = 5.0  # seconds by which a busy machine's hang timeout is longer, for each program that wants a processor


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        seed: it was drawn from.
        fault: what happens.
        layout: one of ``LAYOUTS``.
        load: programs that compute all the while.
    """

    seed: int
    fault: Fault
    layout: str
    load: int

    def __str__(self) -> str:
        calls = f" after {self.fault.calls} calls" if self.fault.calls else ""
        return f"{self.seed}: {named(self.fault)}{calls}, {self.layout}, load {self.load}"


def draw(seed: int) -> Trial:
    """The trial of this number: every kind of fault is as likely as any other, and so is every rank, place and step."""
    choose = random.Random(seed)
    kind, rank = choose.choice(list(PLACES)), choose.choice(list(LABELS))
    place = choose.choice(PLACES[kind])
    started = kind.endswith("worker")  # which has started by step 2, and is needed again before the last one
    moments = range(1, 3) if kind == "wrong data" else MOMENTS.get(place, range(1, STEPS))  # more is to be read then
    step = choose.choice(range(2, 5) if started else moments)
    calls = int(10 ** choose.uniform(1, 5.3)) if place == "anywhere" else 0
    return Trial(seed, Fault(kind, rank, place, step, calls), choose.choice(list(LAYOUTS)), choose.choice((0, 0, 1, 2)))


def why_impossible(trial: Trial) -> str | None:
    """Why this machine cannot play the trial, or None where it can."""
    return why_not() if trial.fault.kind == "lost network" else None


def run_trial(trial: Trial, folder: Path) -> None:
    """Let the fault happen to a job in ``folder``, then let the job go on from its last checkpoint.

    A clock that jumps is no fault: such a job is to end as if nothing had happened.

    Raises:
        AssertionError: a rank did not end in time or did not say why, something was left, or the weights are not bit
            for bit those of a job to which nothing happened.
    """
    _write_data(folder)
    slow = slowness()
    settings = settings_for(trial.fault, HANG_TIMEOUT * slow + _PATIENCE * trial.load)
    settings["deadline"] = deadline = DEADLINE * slow
    settings["strategy"] |= LAYOUTS[trial.layout]
    with _busy(trial.load), _hosts_for(trial.fault) as hosts:
        ended = run_forked(Job(folder, trial.fault, hosts=hosts, **settings))
        if trial.fault.kind == "clock jump":
            assert_healthy(ended)
            assert _weights(folder) == _undisturbed_weights(trial.layout), "the clock changed the weights"
            return
        assert_all_ended(ended, trial.fault)
        if trial.fault.kind == "wrong data":
            assert_told_of_data(ended)
            _write_data(folder)
        elif trial.fault.kind == "lost network":
            assert_told_of_network(ended)
        else:
            assert_all_told(ended, trial.fault)
        resumed = run_forked(Job(folder, strategy=_strategy(trial.layout), ckpt_path="last", deadline=deadline))
    became = (resumed.code, resumed.finished, resumed.left)
    assert became == (0, dict.fromkeys(LABELS, STEPS), []), f"{resumed.said}\nThe job that went on: {became}"
    assert _weights(folder) == _undisturbed_weights(trial.layout), "the resumed job has other weights"


def _strategy(layout: str) -> dict[str, Any]:
    return {"encoder_ranks": 1, **LAYOUTS[layout]}


def _write_data(folder: Path) -> None:
    data = folder / "data"
    write_records(data, 24, "train.jsonl")
    write_records(data, 8, "val.jsonl", seed=1)


def _weights(folder: Path) -> dict[str, str]:
    """File of the last checkpoint -> digest of the weights and optimizer states in it."""
    checkpoint = folder / "checkpoints" / "last.ckpt"
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert files, "there is no last checkpoint"
    return {str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@cache
def _undisturbed_weights(layout: str) -> dict[str, str]:
    with TemporaryDirectory(prefix="undisturbed-") as name:
        folder = Path(name)
        _write_data(folder)
        ended = run_forked(Job(folder, strategy=_strategy(layout), deadline=DEADLINE * slowness()))
        assert (ended.code, ended.left) == (0, []), ended.said
        return _weights(folder)


@contextmanager
def _hosts_for(fault: Fault) -> Iterator[int | None]:
    """Inside, there are two hosts of this process if the fault needs them."""
    if fault.kind != "lost network":
        yield None
        return
    with Hosts():
        yield os.getpid()


@contextmanager
def _busy(programs: int) -> Iterator[None]:
    """Inside, so many programs want a processor."""
    work = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with this process
    running = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()
