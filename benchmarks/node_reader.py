"""Bytes that the ranks of a node read of one epoch: each for itself, and by the reader of their node.

python benchmarks/node_reader.py            1, 2, 4 and 8 ranks: some minutes
python benchmarks/node_reader.py --quick    1 and 2 ranks, few records, to see that it runs

Ranks are processes of Lightning's DDP that load real steps and train one weight. Bytes of files are counted as they are
read, those of an address by the server that gives them. Every rank writes down a digest of its steps: those of both
ways must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import lightning as L
import numpy as np
import torch
from PIL import Image

from benchmarks.launch import launch, machine
from benchmarks.modules import IMAGES, ROOT, TOKENIZER
from benchmarks.report import machine_line, table, write_results
from benchmarks.web import served
from flowtrain_lightning.data import FlowDataModule, IndexConfig, StepBatch
from flowtrain_lightning.data.node import node_sources
from flowtrain_lightning.data.sources.data_file import DataFile

RANKS = (1, 2, 4, 8)
FORMS = ("a tar shard", "Parquet", "a tar shard at an address", "Parquet at an address", "JSON Lines as a stream")
SAMPLES = 16
"""Of a step over all ranks."""


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        form: of `FORMS`.
        given: the file or its address.
        ranks: processes.
        each: every rank reads for itself.
        cache: folder of the index.
        folder: where ranks write what they found.
    """

    form: str
    given: str
    ranks: int
    each: bool
    cache: str
    folder: str


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=320, help="of one picture each")
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, few records")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    where, ranks = machine(), RANKS[:2] if options.quick else RANKS
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        files = write_files(Path(temporary), 3 * SAMPLES if options.quick else options.records)
        runs = [
            run(form, files[form.removesuffix(" at an address")], count, each, Path(temporary))
            for form in FORMS
            for count in ranks
            for each in (False, True)
        ]
        sizes = {name: file.stat().st_size for name, file in files.items()}
    text = f"{machine_line(where)}\n\n{results_table(runs, ranks, sizes)}\n{MEANING}"
    write_results(options.out, "node-reader", {"machine": where, "sizes": sizes, "runs": runs}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def write_files(folder: Path, count: int) -> dict[str, Path]:
    """The same records in each form."""
    import pyarrow.parquet

    generator = np.random.default_rng(0)
    rows, lines = [], []
    with tarfile.open(folder / "train.tar", "w") as tar:
        for number in range(count):
            picture = io.BytesIO()
            pixels = generator.integers(0, 256, (160, 160, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(picture, "PNG")
            turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": f"Number {number}."}]
            rows.append({"images": [{"bytes": picture.getvalue()}], "messages": turns})
            lines.append(json.dumps({"text": f"Number {number} " + "of so many " * (1 + number % 40)}) + "\n")
            for ending, content in (("json", json.dumps({"messages": turns}).encode()), ("png", picture.getvalue())):
                info = tarfile.TarInfo(f"{number:06}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet", row_group_size=SAMPLES)
    (folder / "train.jsonl").write_text("".join(lines))
    names = {"a tar shard": "train.tar", "Parquet": "train.parquet", "JSON Lines as a stream": "train.jsonl"}
    return {form: folder / name for form, name in names.items()}


def run(form: str, file: Path, ranks: int, each: bool, folder: Path) -> dict[str, Any]:
    """One epoch: what was read of it, and a digest of each rank's steps."""
    own = folder / f"{form} {ranks} {each}"
    own.mkdir()
    sent: list[int] = []
    far = form.endswith("address")
    with served(file.parent, sent) if far else nullcontext(str(file.parent)) as place:
        job = Job(form, f"{place}/{file.name}", ranks, each, str(folder / f"index of {own.name}"), str(own))
        if "stream" not in form:
            launch(measure, job, 1, own / "measured", 600.0)
        for counted in (own / "counted", sent):
            counted.clear() if isinstance(counted, list) else counted.unlink(missing_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        launch(train, job, ranks, own, 600.0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    nbytes = sum(sent) if far else sum(map(int, (own / "counted").read_text().split()))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    digests = [(own / f"digest{rank}").read_text() for rank in range(ranks)]
    found = {**asdict(job), "bytes": nbytes, "processor_seconds": seconds, "digests": digests}
    print(
        json.dumps({name: found[name] for name in ("form", "ranks", "each", "bytes", "processor_seconds")}), flush=True
    )
    return found


def measure(job: Job) -> None:
    """Write the index, which the ranks then find."""
    count_bytes(job)
    data_module(job).setup("fit")


def train(job: Job) -> None:
    """What each rank does."""
    count_bytes(job)
    if job.each:
        sharing: Any = node_sources
        sharing.can_read_for_others = lambda: False
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    module = Digest()
    trainer.fit(module, data_module(job))
    Path(job.folder, f"digest{trainer.global_rank}").write_text(module.digest.hexdigest())


def data_module(job: Job) -> FlowDataModule:
    """The data of a run."""
    given: Any = Lines(Path(job.given), Path(job.folder, "counted")) if "stream" in job.form else job.given
    settings: dict[str, Any] = {"tokenizer": TOKENIZER, "images": IMAGES, "token_budget": 1024, "seed": 1}
    return FlowDataModule(given, global_batch_size=SAMPLES, index=IndexConfig(cache_dir=job.cache), **settings)


class Digest(L.LightningModule):
    """Trains one weight, and digests all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.digest = hashlib.sha256()

    def training_step(self, batch: StepBatch, _: int) -> torch.Tensor:
        tensors = [tensor for microbatch in batch.microbatches if microbatch for tensor in microbatch.tensors]
        tensors += [media.pixels for of_role in batch.media.values() for media in of_role if media]
        for tensor in tensors:
            self.digest.update(tensor.contiguous().numpy().tobytes())
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lines:
    """A stream of the rows of a file.

    Args:
        file: of JSON Lines.
        counted: gets the bytes of each row that is read.
    """

    def __init__(self, file: Path, counted: Path) -> None:
        self._file, self._counted = file, counted

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._file.open("rb") as file:
            for line in file:
                note(self._counted, len(line))
                yield json.loads(line)


class Counted(io.FileIO):
    """A file that notes how many bytes are read of it."""

    def __init__(self, path: Path, counted: Path) -> None:
        super().__init__(path)
        self._counted = counted

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        note(self._counted, count or 0)
        return count

    def readall(self) -> bytes:
        content = super().readall()
        note(self._counted, len(content))
        return content


def count_bytes(job: Job) -> None:
    """From now on what this process and its forks read of data files is noted; of an address its server does that."""
    counted = Path(job.folder, "counted")
    if not job.form.endswith("address"):
        reading: Any = DataFile
        reading.open = lambda file: io.BufferedReader(Counted(file.path, counted))


def note(file: Path, count: int) -> None:
    """Write a number behind what others write at the same time."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, b"%d\n" % count)
    os.close(descriptor)


def results_table(runs: list[dict[str, Any]], ranks: tuple[int, ...], sizes: dict[str, int]) -> str:
    """A row for each form: megabytes for so many ranks, by the node's reader and by each rank for itself."""
    rows = []
    for form in FORMS:
        of_form = {(each["ranks"], each["each"]): each for each in runs if each["form"] == form}
        equal = all(of_form[count, True]["digests"] == of_form[count, False]["digests"] for count in ranks)
        rows += [
            [
                f"{form}, {'each rank' if alone else 'once a node'}",
                f"{sizes[form.removesuffix(' at an address')] / 1e6:.2f}",
                *(f"{of_form[count, alone]['bytes'] / 1e6:.2f}" for count in ranks),
                "yes" if equal else "NO",
            ]
            for alone in (False, True)
        ]
    head = [
        "MB read in an epoch",
        "in the file",
        *(f"{count} rank{'s' * (count > 1)}" for count in ranks),
        "same steps",
    ]
    return table(head, rows)


MEANING = """A run of one epoch after its data were measured; what each rank reads to open them is counted, too. `once a
node` is what the package does where a node has several ranks; `each rank` is the same run with that turned off. `same
steps`: all tensors of all ranks' steps are equal to the bit in both. These ranks all encode and read texts, so each
record of a shard belongs to one of them: where others encode, two would read it.
"""


if __name__ == "__main__":
    main()
