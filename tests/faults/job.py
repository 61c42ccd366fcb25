"""A job: the training script on several ranks, one of which breaks; and what became of it."""

from __future__ import annotations

import json
import tempfile
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.fault import Fault
from tests.hosts import ADDRESSES
from tests.paths import python_path
from tests.ports import free_port

DEADLINE = 150.0
"""Seconds after which a job on a calm machine counts as hanging."""


@dataclass(frozen=True)
class Job:
    """What runs.

    Attributes:
        folder: of the job alone, or of a job that this one goes on from; the records are in its ``data``.
        fault: what happens to which rank.
        ranks: processes.
        strategy: arguments of the strategy.
        workers: processes that load data, of each rank.
        first_step: seconds that the first computation on each rank takes.
        afterwards: seconds that rank 0 spends after ``fit``.
        ckpt_path: of ``fit``.
        interrupt: Ctrl-C is pressed when rank 0 is in step 2.
        hosts: the process that has made the two hosts on which the ranks run; None where all run here.
        deadline: seconds after which what is left of the job is killed.
    """

    folder: Path
    fault: Fault | None = None
    ranks: int = 3
    strategy: dict[str, Any] = field(default_factory=lambda: {"encoder_ranks": 1})
    workers: int = 0
    first_step: float = 0.0
    afterwards: float = 0.0
    ckpt_path: str | None = None
    interrupt: bool = False
    hosts: int | None = None
    deadline: float = DEADLINE
    port: int = field(default_factory=free_port)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def temporary(self) -> Path:
        """What the job takes for the system's folder of temporary files. Workers bind sockets there: it is short."""
        return Path(tempfile.gettempdir()) / f"job-{self.mark[:8]}"

    def environment(self) -> dict[str, str]:
        """The environment of all its processes."""
        names = ("ranks", "strategy", "workers", "first_step", "afterwards", "ckpt_path", "hosts")
        settings = {name: getattr(self, name) for name in names}
        settings["fault"] = asdict(self.fault) if self.fault else None
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(),
            "FOLDER": str(self.folder),
            "SETTINGS": json.dumps(settings),
            "JOB": self.mark,
            "MASTER_PORT": str(self.port),
            "TMPDIR": str(self.temporary),
        }

    def place(self, rank: int) -> dict[str, str]:
        """What else is in the environment of a rank that is started by itself, as on one of several nodes."""
        return {
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": ADDRESSES[0],
        }


@dataclass(frozen=True)
class Ended:
    """What became of a job.

    Attributes:
        folder: where it ran.
        code: exit code of the process that was started.
        codes: rank -> exit code, of the ranks whose code could be learned.
        seconds: rank -> how long after the fault its process ended.
        said: stdout and stderr of all its processes.
        files: rank -> its file ``fault-rank<r>.txt``.
        left: what it left behind: processes, files in shared memory and in the temporary folder, the listening port.
    """

    folder: Path
    code: int
    codes: dict[int, int]
    seconds: dict[int, float]
    said: str
    files: dict[int, str]
    left: list[str]

    @property
    def finished(self) -> dict[int, int]:
        """Rank -> steps made, of the ranks that came to the end of the script's fit."""
        return {rank_of(path): int(path.read_text()) for path in self.folder.glob("rank*.finished")}

    def steps(self, rank: int) -> list[int]:
        """The steps that a rank began, over all jobs in this folder."""
        return [int(line) for line in text_of(self.folder / f"rank{rank}.steps").split()]


def text_of(path: Path) -> str:
    """What the file holds; nothing where it is not there."""
    return path.read_text(errors="replace") if path.exists() else ""


def rank_of(path: Path) -> int:
    """The rank whose number stands in the file's name."""
    return int("".join(filter(str.isdigit, path.name)))
