"""What a million records cost: indexed by the command, indexed again from the sizes that it kept, and trained from.

python benchmarks/indexing.py              1,000 and 1,000,000 records: a quarter of an hour, and a gigabyte of disk
python benchmarks/indexing.py --quick      1,000, to see that it runs

The records are real ones, each again and again under another id, so that their images are few and shared. Every command
runs in processes of its own; its CPU time is that of all of them, the import of torch and Lightning included, and its
memory the most that any of them held. The few records show what is not the data's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

from benchmarks.launch import machine
from benchmarks.modules import IMAGES, ROOT, SEED, TOKENIZER, sizes, training_records
from benchmarks.report import machine_line, table, write_results

FLOWTRAIN = [sys.executable, "-c", "from flowtrain_lightning.cli import main; main()"]
PROCESSES = 2
STEPS = 4


class Used(NamedTuple):
    """What a command took.

    Attributes:
        cpu_seconds: of all its processes together.
        wall_seconds: from its start to its end.
        peak_megabytes: the most memory that was resident of one of its processes.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_megabytes: float


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    where, source = machine(), training_records()
    runs: list[dict[str, Any]] = []
    for count in (1_000,) if options.quick else (1_000, 1_000_000):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            folder = Path(temporary)
            config = write_config(folder, write_records(folder / "train.jsonl", source, count))
            index = ["index", "--config", str(config), "--processes", str(PROCESSES)]
            for name, command in (
                ("indexed", index),
                ("indexed from kept sizes", index),
                (f"trained, {STEPS} steps", ["fit", "--config", str(config)]),
            ):
                used = measured(command, folder / "log.txt")
                size = (folder / "train.jsonl").stat().st_size
                runs.append({"records": count, "bytes": size, "command": name, **used._asdict()})
                print(f"{count:,} records, {name}: {used.cpu_seconds:.0f} CPU s, {used.peak_megabytes:.0f} MB")
    text = f"{machine_line(where)}\n\n{indexing_table(runs)}"
    write_results(options.out, "indexing", {"machine": where, "records": source.name, "runs": runs}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def write_records(file: Path, source: Path, count: int) -> Path:
    """Write the records of a file again and again, under ids and with paths of their own, until there are enough."""
    with file.open("w") as out:
        for number, record in enumerate(islice(cycle(_anywhere(source)), count)):
            out.write(json.dumps({**record, "id": str(number)}) + "\n")
    return file


def _anywhere(source: Path) -> Iterator[dict[str, Any]]:
    """The records of a file with the paths of their images from the root."""
    with source.open() as lines:
        for line in lines:
            record = json.loads(line)
            images = [{**image, "path": str(source.parent / image["path"])} for image in record.get("images", [])]
            yield {**record, "images": images}


def write_config(folder: Path, records: Path) -> Path:
    """Write the YAML file that the commands take; JSON is YAML."""
    config = {
        "seed_everything": SEED,
        "model": {"class_path": "recipes.quickstart.module.QuickstartVLM", "init_args": sizes("tiny")},
        "data": {
            "train": str(records),
            "tokenizer": str(TOKENIZER),
            "images": asdict(IMAGES),
            "token_budget": 512,
            "global_batch_size": 32,
            "index": {"too_long": "drop"},
            "num_workers": 1,
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": "flowtrain",
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "default_root_dir": str(folder),
        },
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    return file


def measured(command: list[str], log: Path) -> Used:
    """Run ``flowtrain`` with these arguments.

    Raises:
        RuntimeError: it failed.
    """
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen([*FLOWTRAIN, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)  # of it and of the processes that it has waited for
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"flowtrain {' '.join(command)} ended with code {process.returncode}:\n{log.read_text()}")
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # bytes there, KiB elsewhere
    return Used(used.ru_utime + used.ru_stime, time.monotonic() - begin, peak / 1e6)


def indexing_table(runs: list[dict[str, Any]]) -> str:
    """All runs as a table."""
    head = ["records", "command", "CPU s", "of two cores", "as it ran", "MB of a process"]
    rows = [
        [
            f"{run['records']:,}",
            run["command"],
            f"{run['cpu_seconds']:.1f}",
            f"{run['cpu_seconds'] / 2:.1f} s",
            f"{run['wall_seconds']:.1f} s",
            f"{run['peak_megabytes']:.0f}",
        ]
        for run in runs
    ]
    return table(head, rows)


if __name__ == "__main__":
    main()
