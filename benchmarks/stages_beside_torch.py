"""Two stages beside those of `torch.distributed.pipelining`: step time and memory, on equal lengths and in turns.

python benchmarks/stages_beside_torch.py            five rounds of both: about four minutes on two idle cores
python benchmarks/stages_beside_torch.py --quick    one short round, to see that it runs

Both train the same blocks by 1F1B over two processes of one thread each, torch by its point-to-point over gloo. Lengths
are equal since it takes no others. Ours loads its samples and runs under Lightning; torch has its tokens at hand. A
round is a run of each; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.emulated_records import emulated_data, write_records
from benchmarks.launch import launch, machine
from benchmarks.measure import Meter, read_ranks
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import FlowModule, FlowTrainStrategy, PackedBatch, PackedMedia
from flowtrain_lightning.allocator import Allocation, Layout

OURS, TORCH = "flowtrain", "torch.distributed.pipelining"
_STAGES = 2
_DEADLINE = 300.0


@dataclass(frozen=True)
class Job:
    """What one run does.

    Attributes:
        data: folder of the records.
        folder: where the ranks write what they measured.
        width: of the hidden state.
        blocks: of the model.
        microbatches: of a step, of one sample each.
        steps: that are measured, after one that is not.
    """

    data: Path
    folder: Path
    width: int = 512
    blocks: int = 8
    microbatches: int = 8
    steps: int = 6

    @property
    def most_tokens(self) -> int:
        """Of a sample, with what the conversation's form adds."""
        return 512


class Block(nn.Module):
    """A feed-forward network beside the hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[tokens, width]``."""
        found: Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return found


class Decoder(nn.Module):
    """Embedding, blocks and head.

    Args:
        job: has its sizes.
        vocabulary: rows of the embedding.
    """

    def __init__(self, job: Job, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, job.width)
        self.blocks = nn.ModuleList(Block(job.width) for _ in range(job.blocks))
        self.head = nn.Linear(job.width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[tokens, vocabulary]``."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        found: Tensor = self.head(hidden)
        return found


VOCABULARY = 4096


class TextModule(FlowModule):
    """The decoder, and an encoder that has nothing to do."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.mark_checked()

    def configure_encoder(self) -> None:
        """One weight."""
        self.encoder = nn.Linear(1, 1, bias=False)

    def configure_backbone(self) -> None:
        """The decoder."""
        self.backbone = Decoder(self.job, VOCABULARY)

    def encode(self, media: PackedMedia) -> Tensor:
        """There are no media."""
        raise AssertionError(f"there are no pictures, but {len(media.rows)} are to be encoded")

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        """Tokens alone."""
        return {"tokens": batch.tokens}

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        """Of the next tokens."""
        return summed_loss(outputs, batch.labels), int((batch.labels >= 0).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def summed_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy."""
    return nn.functional.cross_entropy(outputs.float(), labels, ignore_index=-100, reduction="sum")


class Peak(L.Callback):
    """Writes how far this rank's memory has grown while it trained, in bytes, into ``memory<rank>``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes what there is before the first step."""
        self._before = forget_peak()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the difference."""
        write_peak(self._folder, trainer.global_rank, self._before)


def train_ours(job: Job) -> None:
    """Train in stages over the pool."""
    layouts = {"encoder": Layout(_STAGES), "backbone": Layout(1, pipeline=_STAGES)}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=_STAGES,
        strategy=FlowTrainStrategy(
            allocation=Allocation("colocated", layouts, dict.fromkeys(layouts, tuple(range(_STAGES))))
        ),
        max_steps=1 + job.steps,
        callbacks=[Peak(job.folder), Meter(job.folder, 1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(TextModule(job), emulated_data(job.data, job.microbatches, job.most_tokens))


def train_torch(job: Job) -> None:
    """Train by torch's own stages, on tokens of the same number."""
    rank, tokens = int(os.environ["LOCAL_RANK"]), int((job.data / "tokens").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=_STAGES)
    whole = Decoder(job, VOCABULARY)
    half = job.blocks // _STAGES
    blocks = whole.blocks[:half] if rank == 0 else whole.blocks[half:]
    part = nn.Sequential(whole.embedding, *blocks) if rank == 0 else nn.Sequential(*blocks, whole.head)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    stage = PipelineStage(part, rank, _STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.microbatches, loss_fn=summed_loss, scale_grads=False)
    drawn = torch.randint(VOCABULARY, (job.microbatches * tokens,))
    before, ends = forget_peak(), []
    for _ in range(1 + job.steps):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(drawn)
        else:
            schedule.step(target=drawn, losses=[])
        optimizer.step()
        ends.append(time.monotonic())
    write_peak(job.folder, rank, before)
    (job.folder / f"ends{rank}").write_text(" ".join(map(str, ends)))
    dist.destroy_process_group()


def forget_peak() -> int:
    """What this process holds now, in bytes; what it has held before does not count any more."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_peak(folder: Path, rank: int, before: int) -> None:
    """Writes by how much the most that this process has held is above ``before``."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"memory{rank}").write_text(str(peak - before))


def measure(job: Job, train: Callable[[Job], None]) -> dict[str, float]:
    """Seconds of a step, and bytes by which the ranks together have grown."""
    job.folder.mkdir()
    launch(train, job, _STAGES, job.folder, _DEADLINE)
    if train is train_ours:
        rank, tokens = read_ranks(job.folder)[0], int((job.data / "tokens").read_text())
        held = rank["counts"]["microbatches"], rank["counts"]["tokens"]
        count = job.steps * job.microbatches
        assert held == (count, count * tokens), (
            f"torch computes {count} microbatches of {tokens} tokens, but here {held}"
        )
        ends = rank["ends"]
    else:
        ends = [float(each) for each in (job.folder / "ends0").read_text().split()]
    steps = [after - before for before, after in pairwise(ends)]
    grown = sum(int((job.folder / f"memory{rank}").read_text()) for rank in range(_STAGES))
    return {"step": statistics.median(steps), "bytes": float(grown)}


def text(results: dict[str, Any]) -> str:
    """The table: both, and the ratio of ours to torch's."""
    rounds = results["rounds"]
    rows = []
    for name, unit, scale in (("step", "s", 1.0), ("bytes", "MiB", 2.0**20)):
        medians = {way: statistics.median(each[way][name] for each in rounds) / scale for way in (OURS, TORCH)}
        ratio = statistics.median(each[OURS][name] / each[TORCH][name] for each in rounds)
        rows.append([name, *(f"{medians[way]:.3f} {unit}" for way in (OURS, TORCH)), f"{ratio:.3f}"])
    said = f"Two stages, {len(rounds)} rounds in turns; medians. Bytes: by how much both ranks grow in training."
    return "\n\n".join([said, table(["", OURS, TORCH, "ratio"], rows), machine_line(results["machine"])]) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "rounds": []}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        data = Path(temporary) / "data"
        write_records(data, 64, pictures={0: 1.0}, words=(400, 401))
        module = emulated_data(data, 8, 512)
        module.setup("fit")
        sizes = module.train_dataloader().steps.samples.source.sizes
        (data / "tokens").write_text(str(int(sizes(torch.arange(1).numpy()).tokens[0])))
        for number in range(1 if options.quick else options.rounds):
            found = {}
            for name, train in ((OURS, train_ours), (TORCH, train_torch)):
                settings = {"width": 64, "steps": 2} if options.quick else {}
                job = Job(data, Path(temporary) / f"{number}-{name}", **settings)
                found[name] = measure(job, train)
            results["rounds"].append(found)
            print(f"round {number + 1}: {found}", flush=True)
    write_results(options.out, "stages-beside-torch", results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
