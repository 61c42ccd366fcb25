"""What it gains that a projector which trains behind a frozen tower is the backbone's: steps beside the other way.

python benchmarks/projector.py             one encoder and one backbone rank, both ways in turns: some minutes
python benchmarks/projector.py --quick     at a tiny size, to see that it runs

A LLaVA of tiny width is really trained, by both ways to the same losses. What a tower and a decoder of true width would
take is slept. Where the projector is at the end of the encoder half, that half trains, and its next step can only begin
when the backbone has returned the gradients of this one. Beside it stands what the simulator says.
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
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

import lightning as L
import numpy as np
import transformers
from torch import Tensor

from benchmarks.emulation import Clock
from benchmarks.launch import launch, machine
from benchmarks.modules import ROOT, SEED, TOKENIZER, training_records
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import FlowTrainStrategy, PackedMedia
from flowtrain_lightning.data import FlowDataModule, ImageProcessor, IndexConfig
from flowtrain_lightning.models import LlavaVLM
from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.simulator import simulate_steps
from flowtrain_lightning.packing.step_graph import BatchOf
from flowtrain_lightning.packing.step_work import STEPS_AHEAD, StepRules, TimedBatch, in_two_passes

DEADLINE = 300.0
"""Seconds for one run, on a machine that may be busy otherwise."""

TOWER_SECONDS, DECODER_SECONDS = 0.16, 0.2
"""Of the tower's and the decoder's work for what fills a microbatch; the decoder's backward is in it."""

TOKEN_BUDGET = 1024
FILLED = 0.9
"""Of the budget of each microbatch, on average."""

WAYS = {"encoder": "the encoder's", "backbone": "the backbone's"}
"""Whose the projector is."""


@dataclass(frozen=True)
class Job:
    """What one run does.

    Attributes:
        way: a key of ``WAYS``.
        microbatches: of a step, about.
        samples: that about fill one.
        per_patch: seconds of the tower.
        per_token: seconds of the decoder.
        steps: that are timed, after as many that are not.
        records: the training file.
        folder: where rank 0 writes.
        cache: folder of the data's index.
    """

    way: str
    microbatches: int
    steps: int
    records: Path
    folder: Path
    cache: Path
    samples: int = 1
    per_patch: float = 0.0
    per_token: float = 0.0

    def calibrated(self) -> Job:
        """With as many samples, and seconds for each of their patches and tokens, as the averages ask for."""
        data = self.data()
        data.setup("fit")
        source = data.train_dataloader().steps.samples.source
        sizes = source.sizes(np.arange(len(source)))
        samples = int(FILLED * TOKEN_BUDGET / sizes.tokens.mean())
        patches = samples * float(sizes.media_patches.sum()) / len(sizes)
        tokens = samples * float(sizes.tokens.mean())
        return replace(self, samples=samples, per_patch=TOWER_SECONDS / patches, per_token=DECODER_SECONDS / tokens)

    def data(self) -> FlowDataModule:
        """The data module."""
        return FlowDataModule(
            self.records,
            tokenizer=TOKENIZER,
            images=ImageProcessor(patch_size=14, merge_size=1, fixed_size=(84, 84)),
            global_batch_size=self.samples * self.microbatches,
            token_budget=TOKEN_BUDGET,
            seed=SEED,
            index=IndexConfig(too_long="drop", cache_dir=self.cache),
        )


class SleepingLlava(LlavaVLM):
    """A small LLaVA whose tower and decoder take as long as larger ones."""

    projector: ClassVar[tuple[str, ...]] = LlavaVLM.projector

    def __init__(self, config: Any, per_patch: float, per_token: float) -> None:
        super().__init__(config, frozen="model.vision_tower", lr=1e-3)
        self._clock, self._per_patch, self._per_token = Clock(), per_patch, per_token

    def encode(self, media: PackedMedia) -> Tensor:
        """As ever, and until its time is over."""
        start = time.monotonic()
        features = super().encode(media)
        self._clock.spend(start, self._per_patch * len(media.patches))
        return features

    def backbone_step(self, batch: Any, features: Any, stage: str) -> Any:
        """As ever, and until its time is over."""
        start = time.monotonic()
        result = super().backbone_step(batch, features, stage)
        self._clock.spend(start, self._per_token * len(batch.tokens))
        return result


class WithTheEncoder(SleepingLlava):
    """Its projector is at the end of the encoder half, whatever trains."""

    projector: ClassVar[tuple[str, ...]] = ()


class StepEnds(L.Callback):
    """When steps ended, and with which loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Notes both."""
        self.seconds.append(time.monotonic())
        self.losses.append(float(outputs["loss"]))


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often both ways take turns")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--quick", action="store_true", help="a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    where, found = machine(), []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for microbatches in (1,) if options.quick else (1, 2, 4):
            base = Path(temporary)
            steps = 2 if options.quick else options.steps
            job = Job("", microbatches, steps, training_records(), base, base / "index").calibrated()
            runs = [
                {way: run(replace(job, way=way, folder=base / f"{way} {microbatches} {number}")) for way in WAYS}
                for number in range(1 if options.quick else options.rounds)
            ]
            found.append(figures(microbatches, runs))
            print(json.dumps(found[-1]))
    text = f"{machine_line(where)}\n\n{ways_table(found)}"
    write_results(options.out, "projector", {"machine": where, "steps": found}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def run(job: Job) -> dict[str, Any]:
    """Seconds of a step, and the losses."""
    launch(train, job, 2, job.folder, DEADLINE)
    told: dict[str, Any] = json.loads((job.folder / "rank0.json").read_text())
    return told


def train(job: Job) -> None:
    """Train, as one of two ranks; rank 0 writes what was timed."""
    ends = StepEnds()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FlowTrainStrategy(encoder_ranks=1, placement="separate"),
        max_steps=2 * job.steps,
        callbacks=[ends],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    L.seed_everything(SEED, verbose=False)
    kind = SleepingLlava if job.way == "backbone" else WithTheEncoder
    trainer.fit(kind(config(), job.per_patch, job.per_token), job.data())
    if trainer.global_rank == 0:
        seconds = (ends.seconds[-1] - ends.seconds[-1 - job.steps]) / job.steps
        (job.folder / "rank0.json").write_text(json.dumps({"seconds": seconds, "losses": ends.losses}))


def config() -> Any:
    """Of a LLaVA as small as it may be."""
    image = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER)).convert_tokens_to_ids("<|image_pad|>")
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocabulary = {"vocab_size": 4096, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return transformers.AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **layers, **vocabulary},
        vision_config={"model_type": "clip_vision_model", **layers, "image_size": 84, "patch_size": 14},
        vision_feature_layer=-1,
        image_token_id=image,
    )


def played(microbatches: int) -> float:
    """The gain by the simulator's rules, where all microbatches are equal and nothing else takes time."""
    seconds, steps = [], 2 * STEPS_AHEAD
    for backward, ahead in ((1e-6, 0), (0.0, STEPS_AHEAD)):
        encoding = [
            TimedBatch(TOWER_SECONDS, backward, (BatchOf("backbone", 0, number),)) for number in range(microbatches)
        ]
        work = {"backbone": [[TimedBatch(*in_two_passes(DECODER_SECONDS)[:2])] * microbatches], "encoder": [encoding]}
        rules = StepRules(
            {"backbone": [(0,)], "encoder": [(1,)]}, [Edge("encoder", "backbone")], {"encoder": 4}, steps_ahead=ahead
        )
        ends = simulate_steps([work] * (2 * steps), rules).step_ends
        seconds.append(ends[-1] - ends[steps - 1])
    return seconds[0] / seconds[1]


def figures(microbatches: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds.

    Raises:
        RuntimeError: both ways did not train alike.
    """
    for both in runs:
        apart = max(
            abs(one - other) / other
            for one, other in zip(both["backbone"]["losses"], both["encoder"]["losses"], strict=True)
        )
        if apart > 1e-4:
            raise RuntimeError(f"The losses of both ways differ by {apart:.1e}, relatively.")
    return {
        "microbatches": microbatches,
        **{f"{way}_ms": 1e3 * median(both[way]["seconds"] for both in runs) for way in WAYS},
        "played": played(microbatches),
        "gains": sorted(both["encoder"]["seconds"] / both["backbone"]["seconds"] for both in runs),
    }


def ways_table(found: list[dict[str, Any]]) -> str:
    """All as a table."""
    head = [
        "microbatches a step",
        *(f"the projector is {whose}" for whose in WAYS.values()),
        "gain, each round",
        "played",
    ]
    rows = [
        [
            str(each["microbatches"]),
            *(f"{each[f'{way}_ms']:.0f} ms" for way in WAYS),
            ", ".join(f"{gain:.2f}" for gain in each["gains"]),
            f"{each['played']:.2f}",
        ]
        for each in found
    ]
    return table(head, rows)


if __name__ == "__main__":
    main()
