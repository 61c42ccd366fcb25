"""A long run: what each rank holds, again and again, over tens of thousands of steps. `make long-run` prints it.

Beside it runs plain Lightning, on the same module, data and callbacks in one process: what grows there is not ours.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

import flowtrain_lightning as flow
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import TinyVLM, tiny_data, write_records

LOOKS = 30
"""How often it is looked at what a rank holds."""

RANKS = {"plain Lightning": 1, "flowtrain": 2}
"""What runs -> processes; under flowtrain the first is the backbone rank, the second the encoder rank."""

_RECORDS = 240


class Held(NamedTuple):
    """What a process holds.

    Attributes:
        step: after which.
        seconds: of `time.monotonic`.
        memory: bytes that are this process's alone and stand in no file.
        heap: bytes of them that malloc has given out.
        blocks: pieces of memory that Python has given out, of all its objects together.
        descriptors: that are open.
        threads: that run.
        disk: bytes of all files of the run.
    """

    step: int
    seconds: float
    memory: int
    heap: int
    blocks: int
    descriptors: int
    threads: int
    disk: int


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "inuse", "free", "keep"]
    ]


class Look(L.Callback):
    """Looks at what this process holds, so often that it is `LOOKS` times in all."""

    def __init__(self) -> None:
        self.found: list[Held] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % (trainer.max_steps // LOOKS) == 0:
            gc.collect()
            self.found.append(held(trainer.global_step, Path(trainer.default_root_dir)))


def held(step: int, folder: Path) -> Held:
    """What this process holds now."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo
    heap = library.mallinfo2()
    kilobytes = next(
        int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Anonymous" in line
    )
    return Held(
        step=step,
        seconds=time.monotonic(),
        memory=kilobytes * 1024,
        heap=heap.inuse + heap.hblkhd,
        blocks=sys.getallocatedblocks(),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        disk=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )


def train(folder: Path, *, steps: int, data: str) -> None:
    """What a rank of the run does: a checkpoint every thousand steps, and many epochs."""
    ranks, look = int(os.environ["WORLD_SIZE"]), Look()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=flow.FlowTrainStrategy(encoder_ranks=1) if ranks > 1 else "auto",
        default_root_dir=folder,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[look, ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1000, save_last=True)],
    )
    trainer.fit(TinyVLM(), tiny_data(Path(data), global_batch_size=4))
    write_down(folder, look.found)


def grown(found: list[Held]) -> float:
    """Bytes of memory per step, between the middle and the end: a straight line through the looks."""
    looks = found[len(found) // 2 :]
    steps, memory = [look.step for look in looks], [look.memory for look in looks]
    middle = sum(steps) / len(steps)
    return sum((step - middle) * taken for step, taken in zip(steps, memory, strict=True)) / sum(
        (step - middle) ** 2 for step in steps
    )


def table(name: str, found: list[Held]) -> str:
    """The looks at a process, one line each, under its name."""
    lines = [f"{name}: {grown(found):+.0f} bytes a step in the second half"]
    lines.append("    step | steps/s |   memory |     heap |  Python's blocks | descriptors | threads |   on disk")
    for former, now in zip([None, *found], found, strict=False):
        pace = f"{(now.step - former.step) / (now.seconds - former.seconds):7.0f}" if former else "       "
        lines.append(
            f"{now.step:8,} | {pace} | {now.memory / 1e6:5.1f} MB | {now.heap / 1e6:5.1f} MB | {now.blocks:16,} | "
            f"{now.descriptors:11} | {now.threads:7} | {now.disk / 1e3:6.1f} kB"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--of", choices=RANKS, nargs="*", default=list(RANKS), help="what runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        write_records(Path(name) / "data", _RECORDS, "train.jsonl")
        arguments = {"steps": options.steps, "data": f"{name}/data"}
        for kind in options.of:
            job = Job(kind, "tests.faults.long_run:train", RANKS[kind], arguments, deadline=600 + options.steps)
            done = run_jobs(Path(name), [job])[kind].check()
            for rank, found in enumerate(read_down(done.folder)):
                print(table(f"{kind}, rank {rank}", [Held(*each) for each in found]), flush=True)


if __name__ == "__main__":
    main()
