"""What it saves to encode a picture once: for all questions of a step that ask about it, and for all epochs.

python benchmarks/see_once.py              two real CPU processes, in turns
python benchmarks/see_once.py --quick      a tiny size, to see that it runs; the figures mean nothing

The model is the quickstart's, with a tower of about two thirds of the FLOPs; both ranks encode and train the backbone.
Every picture is asked five questions, once with each of them encoded (as data are whose pictures are augmented, by
nothing here), once shared with ``group_by="media"``. Then the tower is frozen, every picture is asked once, and its
features are kept: the second epoch stands beside the first, and beside the second one of a run that keeps nothing.

CPU time is that of both processes between the ends of two epochs, which other work on the machine hardly changes.
A step has ``SAMPLES``: to sum gradients and to step AdamW takes it the same, whatever is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.launch import launch, machine
from benchmarks.modules import IMAGES, ROOT, SEED, TOKENIZER, sizes
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import FlowDataModule, FlowTrainStrategy, KeepFeatures
from recipes.quickstart.module import QuickstartVLM

QUESTIONS = 5
SIZES = {"encoder_width": 256, "encoder_depth": 7, "backbone_width": 256, "backbone_depth": 4}
SAMPLES = 80
"""Of a step."""
EPOCHS = 2
DEADLINE = 3600.0
WORDS = ("red", "green", "blue", "grey", "dark", "light", "round", "wide", "tall", "small")
WAYS = {
    "each": "five questions a picture, encoded for each",
    "shared": "five questions a picture, encoded once a step",
    "frozen": "frozen tower, nothing kept",
    "kept": "frozen tower, features kept",
}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        way: one of ``WAYS``.
        folder: its own.
        pictures: how many there are where each is asked five questions; five times as many where it is asked one.
        quick: a tiny model.
    """

    way: str
    folder: Path
    pictures: int
    quick: bool

    @property
    def questions(self) -> int:
        """About each picture."""
        return QUESTIONS if self.way in ("each", "shared") else 1

    def data(self) -> FlowDataModule:
        """Records about pictures of noise, one after another."""
        ways: dict[str, dict[str, Any]] = {
            "each": {"augment": unchanged, "group_by": "media"},
            "shared": {"group_by": "media"},
            "frozen": {},
            "kept": {"keep_features": KeepFeatures(self.folder / "features")},
        }
        return FlowDataModule(
            write_records(self.folder, self.pictures * (QUESTIONS // self.questions), self.questions),
            tokenizer=TOKENIZER,
            images=IMAGES,
            global_batch_size=SAMPLES,
            token_budget=1024,
            seed=SEED,
            **ways[self.way],
        )

    def module(self) -> QuickstartVLM:
        """The model; of its FLOPs two thirds are the tower's, where each question's picture is encoded."""
        settings = sizes("tiny") if self.quick else sizes("1:1") | SIZES
        return QuickstartVLM(**settings, freeze_encoder=self.way in ("frozen", "kept"))


def unchanged(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """The same picture: of what is augmented nothing is shared."""
    return image


def write_records(folder: Path, pictures: int, questions: int) -> Path:
    """Writes pictures, and records of a question and an answer."""
    file = folder / "train.jsonl"
    if file.exists():
        return file
    draw, lines = np.random.default_rng(SEED), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(pictures):
        name = f"{number}.png"
        Image.fromarray(draw.integers(0, 256, (140, 140, 3), dtype=np.uint8)).save(folder / name)
        for _ in range(questions):
            asked, answer = (" ".join(draw.choice(WORDS, int(draw.integers(4, 20)))) for _ in range(2))
            messages = [{"role": "user", "content": f"<image>{asked}?"}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"images": [{"path": name}], "messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return count


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count: int = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return count


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""FLOPs of the attention that CPUs have, which PyTorch counts of GPUs alone."""


class FlopsOfSteps(L.Callback):
    """FLOPs of the steps that train, without what looks at the module before them."""

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False, depth=4, custom_mapping=_ATTENTION)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        self.counter.__enter__()  # type: ignore[no-untyped-call]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends it."""
        self.counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class EpochEnds(L.Callback):
    """CPU time of this process at the end of each epoch, and the losses."""

    def __init__(self) -> None:
        self.seconds = [0.0]
        self.losses: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        self.seconds = [time.process_time()]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Notes the loss."""
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the time."""
        self.seconds.append(time.process_time())


def trainer(job: Job, devices: int, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    """A quiet one."""
    L.seed_everything(SEED, verbose=False)
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
        **settings,
    )


def train(job: Job) -> None:
    """Train, as one of two ranks; each writes what it took."""
    ends = EpochEnds()
    strategy = FlowTrainStrategy(placement="colocated")
    run = trainer(job, 2, ends, strategy=strategy, max_epochs=EPOCHS)
    run.fit(job.module(), job.data())
    seconds = np.diff(ends.seconds).tolist()
    (job.folder / f"rank{run.global_rank}.json").write_text(json.dumps({"seconds": seconds, "losses": ends.losses}))


def flops(job: Job) -> dict[str, float]:
    """FLOPs of a step in one process, and the tower's part of them; all steps are alike."""
    module, counted = job.module(), FlopsOfSteps()
    trainer(job, 1, counted, max_steps=1).fit(module, job.data())
    counts = counted.counter.get_flop_counts()
    tower = sum(counts[type(module.encoder).__name__].values())
    return {"total": float(counted.counter.get_total_flops()), "tower": float(tower)}


def measure(job: Job) -> dict[str, Any]:
    """CPU seconds of both ranks in each epoch, and the losses."""
    launch(train, job, 2, job.folder, DEADLINE)
    ranks = [json.loads((job.folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {"seconds": np.sum([rank["seconds"] for rank in ranks], axis=0).tolist(), "losses": ranks[0]["losses"]}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often all ways take turns")
    parser.add_argument("--pictures", type=int, default=32, help="how many are asked five questions each")
    parser.add_argument("--quick", action="store_true", help="a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    where, rounds = machine(), 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        jobs = [
            Job(way, Path(temporary) / way, 16 if options.quick else options.pictures, options.quick) for way in WAYS
        ]
        counted = {job.way: flops(replace(job, folder=job.folder / "flops")) for job in jobs[:2]}
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for job in jobs:
                runs[job.way].append(measure(replace(job, folder=job.folder / str(number))))
    found = figures(counted, runs)
    text = f"{machine_line(where)}\n\n{report(found)}"
    write_results(options.out, "see-once", {"machine": where, "flops": counted, "runs": runs, "figures": found}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def figures(counted: dict[str, dict[str, float]], runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """What is claimed, from the runs of all rounds."""
    epochs = {
        way: [median(run["seconds"][epoch] for run in of_way) for epoch in (0, 1)] for way, of_way in runs.items()
    }
    kept = {way: [run["losses"] for run in runs[way]] for way in ("frozen", "kept")}
    difference = np.abs(np.array(kept["kept"]) - np.array(kept["frozen"])).max()
    return {
        **{f"{way}, epoch {number + 1}": seconds for way, of in epochs.items() for number, seconds in enumerate(of)},
        "tower's part of the FLOPs": counted["each"]["tower"] / counted["each"]["total"],
        "FLOPs of each over shared": counted["each"]["total"] / counted["shared"]["total"],
        "CPU time of each over shared": epochs["each"][1] / epochs["shared"][1],
        "CPU time of epoch 1 over epoch 2, features kept": epochs["kept"][0] / epochs["kept"][1],
        "CPU time of epoch 2, nothing kept over features kept": epochs["frozen"][1] / epochs["kept"][1],
        "largest difference of losses, kept and not": float(difference),
    }


def report(found: dict[str, float]) -> str:
    """The figures as tables."""
    seconds = [[WAYS[way], *(f"{found[f'{way}, epoch {number}']:.2f}" for number in (1, 2))] for way in WAYS]
    others = [[name, f"{value:.3g}"] for name, value in found.items() if ", epoch " not in name]
    head = ["CPU seconds of two processes", "epoch 1", "epoch 2"]
    return f"{table(head, seconds)}\n\n{table(['figure', 'value'], others)}\n"


if __name__ == "__main__":
    main()
