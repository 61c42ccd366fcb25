"""Slow decoding beside a training rank that waits: local workers and Ray's producers, in one run.

python benchmarks/producers.py             4K JPEGs, then clips: some minutes
python benchmarks/producers.py --quick     small ones, to see that it runs

The rank sleeps where it would train, a fifth of what one process takes to make a step; loaders really read, decode,
resize, tokenise and pack, on whatever processors there are. All loaders of a medium are there at once and have their
turns, several times; those whose turn it is not have made what they may, and rest. A turn counts the processor seconds
of all processes of its loader, Ray's own and the rank's part included, from rest to rest: just as many steps are made
as are read. Samples a second and stalls are those of steps that were not yet made when the turn began.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import psutil

from benchmarks.launch import machine
from benchmarks.modules import ROOT, TOKENIZER
from benchmarks.report import machine_line, table, write_results
from benchmarks.slow_media import write_clips, write_pictures
from flowtrain_lightning.data import (
    ChatTemplate,
    FlowDataModule,
    ImageProcessor,
    IndexConfig,
    StepBatch,
    VideoProcessor,
)

SAMPLES = 4
"""Of a step, each with one picture or one clip."""

SLEEP_SHARE = 0.2
"""Of the seconds that one process takes to make a step."""

LOADERS: dict[str, dict[str, Any]] = {
    "no worker": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 producers": {"num_workers": 2, "producers": "ray"},
    "4 producers": {"num_workers": 4, "producers": "ray"},
    "8 producers": {"num_workers": 8, "producers": "ray"},
}
MEDIA: dict[str, Callable[..., Path]] = {"a 4K JPEG": write_pictures, "a clip": write_clips}

_REST_SECONDS = 1.0
_REST_SHARE = 0.05
"""Of one processor, below which a loader rests: what Ray's own processes always take is less."""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of each turn, beside those that are ahead")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each loader")
    parser.add_argument("--quick", action="store_true", help="small media; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)
    where = machine()
    loaders = list(LOADERS)[1:3] if options.quick else list(LOADERS)
    steps, rounds = (2, 1) if options.quick else (options.steps, options.rounds)
    turns: list[dict[str, Any]] = []
    for medium, write in MEDIA.items():
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            shape = {"shape": (270, 480)} if options.quick else {}
            count = SAMPLES * (rounds + 1) * (steps + 32)
            turns += measure(medium, write(Path(temporary), count, **shape), loaders, steps, rounds)
    import ray

    text = "\n".join(
        [
            f"{machine_line(where)} Ray {ray.__version__}.\n",
            *(f"{medium} a sample:\n\n{results_table(loaders, of_medium(turns, medium))}" for medium in MEDIA),
            MEANING,
        ]
    )
    write_results(options.out, "producers", {"machine": where, "ray": ray.__version__, "turns": turns}, text)
    print(f"\n{text}\nWritten to {options.out}.")


@dataclass
class Loader:
    """One that has its turns.

    Attributes:
        name: of `LOADERS`.
        data: its data module.
        steps: what it gives.
        ahead: steps, at most, that are made before they are asked for.
        roots: the processes of this one that belong to it.
        start: seconds until its first step.
        start_processor: processor seconds until then.
    """

    name: str
    data: FlowDataModule
    steps: Iterator[StepBatch]
    ahead: int
    roots: set[psutil.Process]
    start: float
    start_processor: float

    def processor_seconds(self) -> float:
        """Of this process and of all that belong to the loader."""
        found = 0.0
        belong = [process for root in self.roots if root.is_running() for process in (root, *children(root))]
        for process in (psutil.Process(), *belong):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found += times.user + times.system
        return found

    def rest(self) -> None:
        """Wait until it has made what it may."""
        while True:
            before, began = self.processor_seconds(), time.monotonic()
            time.sleep(_REST_SECONDS)
            if self.processor_seconds() - before < _REST_SHARE * (time.monotonic() - began):
                return


def children(process: psutil.Process) -> list[psutil.Process]:
    """All that come from a process."""
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.Error:
        return []
    return found


def start(name: str, file: Path) -> Loader:
    """Let a loader make its first step."""
    own = psutil.Process()
    others, began, before = set(own.children()), time.perf_counter(), sum(own.cpu_times()[:2])
    data = FlowDataModule(
        file,
        tokenizer=TOKENIZER,
        template=ChatTemplate(video_token="<|image_pad|>"),
        images=ImageProcessor(max_pixels=512 * 512),
        videos=VideoProcessor(max_pixels=128 * 28 * 28),
        token_budget=4096,
        global_batch_size=SAMPLES,
        shuffle=False,
        index=IndexConfig(cache_dir=file.parent / "index"),
        **LOADERS[name],
    )
    data.setup("fit")
    loader = data.train_dataloader()
    steps = iter(loader)
    next(steps)
    found = Loader(
        name, data, steps, loader.planned_ahead, set(own.children()) - others, time.perf_counter() - began, 0.0
    )
    found.start_processor = found.processor_seconds() - before
    return found


def measure(medium: str, file: Path, names: list[str], steps: int, rounds: int) -> list[dict[str, Any]]:
    """The turns of all loaders of a medium."""
    turns: list[dict[str, Any]] = []
    loaders: list[Loader] = []
    try:
        for name in names:
            loaders.append(start(name, file))
            loaders[-1].rest()
        alone = turn(loaders[0], steps, 0.0)
        sleep = SLEEP_SHARE * SAMPLES / alone["samples_per_second"]
        for _ in range(rounds):
            for loader in loaders:
                turns.append({"medium": medium, "sleep": sleep, **turn(loader, steps, sleep)})
                print(json.dumps(turns[-1]), flush=True)
    finally:
        for loader in loaders:
            loader.data.teardown()
    return turns


def turn(loader: Loader, steps: int, sleep: float) -> dict[str, Any]:
    """Read steps as a rank would that sleeps where it would train."""
    own = psutil.Process()
    before, memory = loader.processor_seconds(), own.memory_info().rss
    stalls, most, nbytes, began = [], 0, 0, 0.0
    for number in range(loader.ahead + steps):
        if number == loader.ahead:
            began = time.perf_counter()
        asked = time.perf_counter()
        step = next(loader.steps)
        stalls.append(time.perf_counter() - asked)
        nbytes = max(nbytes, sum(media.pixels.nbytes for own in step.media.values() for media in own if media))
        most = max(most, own.memory_info().rss - memory)
        time.sleep(sleep)
    seconds = time.perf_counter() - began
    loader.rest()
    samples = (loader.ahead + steps) * SAMPLES
    return {
        "loader": loader.name,
        "samples_per_second": steps * SAMPLES / seconds,
        "stall": sum(stalls[loader.ahead :]) / seconds,
        "processor_seconds_per_sample": (loader.processor_seconds() - before) / samples,
        "step_bytes": nbytes,
        "rank_bytes": most,
        "ahead": loader.ahead,
        "start_seconds": loader.start,
        "start_processor_seconds": loader.start_processor,
    }


def of_medium(turns: list[dict[str, Any]], medium: str) -> list[dict[str, Any]]:
    """The turns with a medium."""
    return [each for each in turns if each["medium"] == medium]


def results_table(loaders: list[str], turns: list[dict[str, Any]]) -> str:
    """A row for each loader: medians of its turns, and processor seconds beside those of local loaders."""

    def middle(loader: str, name: str) -> float:
        return statistics.median(float(each[name]) for each in turns if each["loader"] == loader)

    def to(loader: str, other: str) -> str:
        if other not in loaders:
            return "-"
        name = "processor_seconds_per_sample"
        of_rounds = [[each[name] for each in turns if each["loader"] == one] for one in (loader, other)]
        return f"{statistics.median(one / two for one, two in zip(*of_rounds, strict=True)):.2f}"

    rows = [
        [
            loader,
            f"{middle(loader, 'samples_per_second'):.2f}",
            f"{100 * middle(loader, 'stall'):.0f} %",
            f"{middle(loader, 'processor_seconds_per_sample'):.3f} s",
            to(loader, "no worker"),
            to(loader, "2 workers"),
            f"{max(each['rank_bytes'] for each in turns if each['loader'] == loader) / 1e6:.0f} MB",
            f"{middle(loader, 'ahead'):.0f}",
            f"{middle(loader, 'start_seconds'):.0f} s",
            f"{middle(loader, 'start_processor_seconds'):.0f} s",
        ]
        for loader in loaders
    ]
    head = [
        "loader",
        "samples/s",
        "stall",
        "processor a sample",
        "to none",
        "to 2 workers",
        "rank grows by",
        "steps ahead",
        "first step after",
        "processor until then",
    ]
    sizes = (
        f"The rank sleeps {middle(loaders[0], 'sleep'):.2f} s a step of {SAMPLES} samples, which has "
        f"{middle(loaders[0], 'step_bytes') / 1e6:.1f} MB of pixels."
    )
    return f"{table(head, rows)}\n{sizes}\n"


MEANING = """Ratios are medians over rounds, each to the turn of the other loader in the same round. Two processes that
decode at once take more processor time than one does, as they share caches and cores: `to 2 workers` says what Ray
costs where as many work. On one machine producers have no more processors than local workers: samples a second and
stalls say how well those there are get used, not what processors of other nodes would gain. What a rank has in memory
does not grow with the producers: steps that are ahead wait in Ray's store.
"""


if __name__ == "__main__":
    main()
