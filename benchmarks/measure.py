"""What is measured inside a run: when steps ended, what they held, and what the lanes did meanwhile."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from flowtrain_lightning.data import IGNORED_LABEL, StepBatch
from flowtrain_lightning.packing.step_plan import FloatArray


class Meter(L.Callback):
    """Writes ``rank<r>.json`` into a folder when training ends.

    Args:
        folder: where to write.
        warmup: steps that are not counted; at least 1.
        set_aside: gives the CPU time of this thread, user and system, that is the benchmark's own affair so far; that
            of this callback is set aside as well.
    """

    def __init__(
        self, folder: Path, warmup: int, set_aside: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    ) -> None:
        self._folder = folder
        self._warmup = warmup
        self._set_aside = set_aside
        self._spent: list[FloatArray] = []  # CPU time of this thread, user and system, at each step's end
        self._aside: list[FloatArray] = []  # of it, what is the benchmark's own affair
        self._metering = np.zeros(2)
        self._delays: list[float] = []
        self._ends: list[float] = []
        self._busy: list[float] = []
        self._family: list[float] = []
        self._counts: dict[str, int] = defaultdict(int)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the time, and what the step held on this rank."""
        begun = np.array(thread_seconds())
        self._spent.append(begun)
        self._aside.append(self._set_aside() + self._metering)
        self._ends.append(time.monotonic())
        self._busy.append(busy_seconds())
        self._family.append(family_seconds())
        self._delays.append(delay_seconds())
        if len(self._ends) > self._warmup:
            for name, count in contents(batch).items():
                self._counts[name] += count
        self._metering = self._metering + thread_seconds() - begun

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        first = self._warmup - 1
        window = (self._ends[first], self._ends[-1])
        aside = self._aside[-1] - self._aside[first]
        user, system = (self._spent[-1] - self._spent[first] - aside).tolist()
        measured = {
            "window": window,
            "ends": self._ends,
            "cores_busy": (self._busy[-1] - self._busy[first]) / (window[1] - window[0]),
            "family_seconds": self._family[-1] - self._family[first],
            "user_seconds": user,
            "system_seconds": system,
            "aside_seconds": float(aside.sum()),
            "delay_seconds": self._delays[-1] - self._delays[first],
            "counts": self._counts,
            "lanes": lanes(trainer, window),
        }
        (self._folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(measured))


def contents(batch: Any) -> dict[str, int]:
    """What one rank holds of a step: samples, target tokens, and how much of what is computed is padding."""
    if not isinstance(batch, StepBatch):
        return {
            "samples": len(batch["tokens"]),
            "targets": int((batch["labels"] != IGNORED_LABEL).sum()),
            "tokens": int(batch["lengths"].sum()),
            "token_places": batch["tokens"].numel(),
            "patches": int(batch["grid"].prod(1).sum()),
            "patch_places": batch["patches"].shape[0] * batch["patches"].shape[1],
        }
    microbatches = [microbatch for microbatch in batch.microbatches if microbatch is not None]
    tokens = sum(len(microbatch.tokens) for microbatch in microbatches)
    every = (media for of_role in batch.media.values() for media in of_role)
    patches = sum(len(media.pixels) for media in every if media is not None)
    return {
        "microbatches": len(microbatches),
        "samples": sum(len(microbatch.samples) for microbatch in microbatches),
        "targets": sum(int((microbatch.labels != IGNORED_LABEL).sum()) for microbatch in microbatches),
        "tokens": tokens,
        "token_places": tokens,
        "patches": patches,
        "patch_places": patches,
    }


def lanes(trainer: L.Trainer, window: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Role -> kind of time -> seconds within the window; nothing under plain Lightning."""
    runner = getattr(trainer.strategy, "runner", None)
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    if runner is not None:
        for span in runner.timeline.spans:
            seconds[span.lane][span.kind] += max(0.0, min(span.end, window[1]) - max(span.start, window[0]))
    return seconds


def thread_seconds() -> tuple[float, float]:
    """CPU time of the calling thread so far, user and system: of a rank's training thread, without its loader's."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_utime, used.ru_stime


def delay_seconds() -> float:
    """How long the calling thread could have run so far, but had no processor; 0 where the system does not tell."""
    statistics = Path("/proc/thread-self/schedstat")
    return int(statistics.read_text().split()[1]) / 1e9 if statistics.exists() else 0.0


def family_seconds() -> float:
    """CPU time of this process with all its threads, and of the processes that it has started; 0 for them elsewhere
    than on Linux."""
    seconds = time.process_time()
    children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children"))
    for child in children.split():
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def busy_seconds() -> float:
    """What all cores have worked since the machine started, for whatever program; 0 where the system does not tell."""
    statistics = Path("/proc/stat")
    if not statistics.exists():
        return 0.0
    user, nice, system, _idle, _wait, hardware, software = map(int, statistics.read_text().split()[1:8])
    return (user + nice + system + hardware + software) / os.sysconf("SC_CLK_TCK")


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote, in rank order."""
    ranks = len(list(folder.glob("rank*.json")))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def throughput(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """One run in figures: rates in 1/s, padding and stalls as shares from 0 to 1, seconds of computing per role."""
    seconds = ranks[0]["window"][1] - ranks[0]["window"][0]
    counts: dict[str, int] = {name: sum(rank["counts"].get(name, 0) for rank in ranks) for name in ranks[0]["counts"]}
    figures = {
        "samples_per_second": counts["samples"] / seconds,
        "targets_per_second": counts["targets"] / seconds,
        "token_padding": 1 - counts["tokens"] / counts["token_places"],
        "patch_padding": 1 - counts["patches"] / counts["patch_places"],
        "step_seconds": float(np.median(np.diff(ranks[0]["ends"])[-len(ranks[0]["ends"]) // 2 :])),
    }
    for role in ("encoder", "backbone"):
        own = [rank["lanes"][role] for rank in ranks if role in rank["lanes"]]
        if own:
            figures[f"{role}_stall"] = sum(kinds.get("stall", 0.0) for kinds in own) / (seconds * len(own))
            figures[f"{role}_compute_seconds"] = sum(kinds.get("compute", 0.0) for kinds in own)
    return figures
