"""All ranks end together, whatever happens to one of them, wherever it is; and nothing is left of the job."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault import Fault
from tests.faults.forks import Forks
from tests.faults.job import Ended, Job, run_script
from tests.faults.train import STEPS
from tests.tiny import write_records

FIRST, BACKBONE, ENCODER = 0, 1, 2
"""The ranks of every job: two backbone ranks, the first of which starts the others, and an encoder rank."""

LABELS = {FIRST: "backbone 0", BACKBONE: "backbone 1", ENCODER: "encoder 0"}

CAUSES = {
    "kill": "died (process",
    "stop": "was stopped in phase",
    "raise": "failed",
    "raise twice": "failed",
    "exit": "failed",
    "loop": "made no progress for",
    "sleep": "made no progress for",
    "kill worker": "failed",
}
"""What the others say of a rank to which this happened."""

SECONDS = 10.0
"""Within which every rank ends after another one's death."""

HANG_TIMEOUT, START_TIMEOUT = 5.0, 10.0
"""After which a rank that is stopped or hangs counts as lost: in training, and before its first step."""

FRESH_HANG_TIMEOUT, SLOW_START = 8.0, 60.0
"""The same for ranks that are healthy but slow, since three interpreters have just started on two busy cores."""

HANGS = ("stop", "loop", "sleep")
"""Faults that take as long to be noticed."""

EVERY_CLASS_ONCE = [
    Fault("kill", ENCODER, "train", step=0),
    Fault("kill", FIRST, "train", step=3),
    Fault("kill", BACKBONE, "wait", step=3),
    Fault("kill", ENCODER, "validation", step=2),
    Fault("kill", FIRST, "save", step=4),
    Fault("kill", BACKBONE, "build"),
    Fault("stop", ENCODER, "wait", step=3),
    Fault("stop", FIRST, "train", step=3),
    Fault("raise", ENCODER, "train", step=3),
    Fault("raise", FIRST, "validation", step=2),
    Fault("raise", ENCODER, "save", step=4),
    Fault("raise twice", ENCODER, "train", step=3),
    Fault("loop", ENCODER, "train", step=3),
    Fault("loop", BACKBONE, "train", step=3),
    Fault("sleep", FIRST, "between", step=3),
    Fault("exit", BACKBONE, "between", step=3),
    Fault("kill worker", ENCODER, "train", step=2),
]

MATRIX = (
    [
        Fault(kind, rank, place, step)
        for kind, rank, (place, step) in itertools.product(
            ("kill", "stop", "raise"),
            (FIRST, BACKBONE, ENCODER),
            (("build", 0), ("train", 0), ("train", 3), ("wait", 3), ("between", 3), ("validation", 2), ("save", 4)),
        )
        if (kind, place) != ("raise", "wait")  # a waiting rank runs no code of the user's
    ]
    + [
        Fault(kind, rank, place, step=3)
        for kind, rank, place in itertools.product(
            ("loop", "sleep", "exit", "kill worker"), (FIRST, BACKBONE, ENCODER), ("train", "between")
        )
    ]
    + [Fault("sleep", rank, "build") for rank in (FIRST, BACKBONE, ENCODER)]
)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 24, "train.jsonl")
    write_records(folder, 8, "val.jsonl", seed=1)
    return folder


@pytest.fixture
def job(tmp_path: Path, records: Path) -> Callable[..., Job]:
    def make(fault: Fault | None = None, **settings: Any) -> Job:
        shutil.copytree(records, tmp_path / "data", dirs_exist_ok=True)
        return Job(tmp_path, fault, **settings)

    return make


def named(fault: Fault) -> str:
    return f"{fault.kind}-{LABELS[fault.rank]}-{fault.place}-{fault.step}".replace(" ", "-")


def settings_for(fault: Fault, hang_timeout: float = HANG_TIMEOUT) -> dict[str, Any]:
    """Limits where the fault is a hang, and workers that load data where they break or must end with their rank."""
    start = START_TIMEOUT if fault.place == "build" else SLOW_START
    limits = {"hang_timeout": hang_timeout, "timeout": start} if fault.kind in HANGS else {}
    workers = int(fault.kind == "kill worker" or fault.place in ("wait", "between"))
    return {"strategy": {"encoder_ranks": 1, **limits}, "workers": workers}


def phase(fault: Fault) -> str:
    """What the broken rank was doing, in the words of the messages."""
    work = "forward of encoder batch 0" if fault.rank == ENCODER else "compute microbatch 0"
    if (fault.rank, fault.place, fault.step) == (ENCODER, "train", 0):
        return "first forward of the encoder' of step 0"
    return {
        "build": "start up' before the first step",
        "train": f"{work}' of step",
        "wait": "wait for ",
        "between": "between steps' of step",
        "validation": f"{work} (val)' of step",
        "save": "save a checkpoint' of step",
        "anywhere": "in phase '",
    }[fault.place]


def sentences(text: str) -> list[str]:
    """What flowtrain said of faults."""
    return [line.removeprefix("flowtrain: ") for line in text.splitlines() if line.startswith("flowtrain: Rank")]


def assert_all_ended(ended: Ended, fault: Fault) -> None:
    """Every rank ended soon and with an error, and nothing is left."""
    slow = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # other programs may want the processors as well
    limit = slow * SECONDS + (START_TIMEOUT if fault.kind in HANGS else 0)
    assert ended.finished == {}
    assert all(code != 0 for rank, code in ended.codes.items() if rank != fault.rank), ended.codes
    assert ended.code != 0 or (fault.kind, fault.rank) == ("exit", FIRST)  # a rank 0 that asks for code 0 gets it
    assert set(ended.seconds) == set(LABELS)
    assert max(ended.seconds.values()) < limit, ended.seconds
    assert ended.left == []


def assert_all_told(ended: Ended, fault: Fault) -> None:
    """Every survivor said, on stderr and in its file, who is to blame, doing what, and why; and nobody else's name."""
    blame = f"Rank {fault.rank} ({LABELS[fault.rank]}) {CAUSES[fault.kind]}"
    told = sentences(ended.said)
    assert len(told) >= len(LABELS) - 1
    assert all(sentence.startswith(blame) for sentence in told), told
    survivors = set(LABELS) - {fault.rank}
    assert set(ended.files) - {fault.rank} == survivors
    for text in ended.files.values():
        assert text.startswith(blame), text
        assert fault.kind == "kill worker" or phase(fault) in text.splitlines()[0], text
        if fault.kind == "raise":
            assert "in happen" in text, "the traceback of the rank that failed"
            assert "ValueError: a fault of the test" in text
        if fault.kind == "kill worker":
            assert "dataloader" in text.lower()
    if fault.kind in ("loop", "sleep"):
        assert "in happen" in ended.files[fault.rank], "where it hangs"


def assert_goes_on(ended: Ended, done: int) -> None:
    """A fit from the last checkpoint made the steps that were missing."""
    assert (ended.code, ended.finished) == (0, dict.fromkeys(LABELS, STEPS)), ended.said
    for rank in LABELS:
        assert ended.steps(rank)[-(STEPS - done) :] == list(range(done, STEPS))
    assert not list(ended.folder.glob("checkpoints/.*")), "what the fault left of a checkpoint"


def assert_healthy(ended: Ended) -> None:
    """All ranks finished, and nobody spoke of a fault."""
    assert (ended.code, ended.finished) == (0, dict.fromkeys(LABELS, STEPS)), ended.said
    assert set(ended.codes.values()) <= {0}
    assert (sentences(ended.said), ended.files, ended.left) == ([], {}, [])
    assert "Error" not in ended.said


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", EVERY_CLASS_ONCE, ids=named)
def test_all_ranks_end_in_time_and_say_who_where_and_why(fault, forks, job):
    ended = forks.run(job(fault, **settings_for(fault)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in MATRIX if fault not in EVERY_CLASS_ONCE], ids=named)
def test_so_they_do_after_any_fault_on_any_rank_at_any_place(fault, forks, job):
    ended = forks.run(job(fault, **settings_for(fault)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


def random_fault(seed: int) -> Fault:
    """On any rank at any moment of the second to fourth step, validations and checkpoints among them."""
    choose = random.Random(seed)
    kind, rank = choose.choice(["kill", "kill", "stop"]), choose.choice(list(LABELS))
    return Fault(kind, rank, "anywhere", calls=int(10 ** choose.uniform(1, 5.3)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 30))])
def test_so_they_do_at_any_moment(seed, forks, job):
    ended = forks.run(job(fault := random_fault(seed), **settings_for(fault)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.parametrize(
    "rank", [BACKBONE, pytest.param(FIRST, marks=pytest.mark.full), pytest.param(ENCODER, marks=pytest.mark.full)]
)
def test_after_a_kill_in_a_checkpoint_fit_goes_on_from_the_one_before(rank, forks, job):
    assert_all_ended(forks.run(job(fault := Fault("kill", rank, "save", step=4))), fault)
    assert_goes_on(forks.run(job(ckpt_path="last")), done=2)


@pytest.mark.parametrize(
    ("rank", "kind"),
    [(ENCODER, "kill"), *(pytest.param(r, k, marks=pytest.mark.full) for r in LABELS for k in ("kill", "raise"))],
)
def test_a_rank_that_ends_before_it_has_met_the_others_ends_them(rank, kind, forks, job):
    ended = forks.run(job(fault := Fault(kind, rank, "start")))
    assert (ended.left, ended.finished) == ([], {})
    assert ended.code != 0
    if rank != FIRST:
        assert_told_at_start(ended, fault)


def assert_told_at_start(ended: Ended, fault: Fault) -> None:
    """Rank 0 said which of the ranks that it had started did not come."""
    blame = f"Rank {fault.rank} ({LABELS[fault.rank]}) ended with exit code {-9 if fault.kind == 'kill' else 1} during"
    assert [sentence[: len(blame)] for sentence in sentences(ended.said)] == [blame]
    assert ended.files[FIRST].startswith(blame)


@pytest.mark.parametrize("kind", ["raise", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("kill", "stop"))])
def test_colocated_ranks_end_together_too(kind, forks, job):
    strategy = {"placement": "colocated", "hang_timeout": HANG_TIMEOUT}
    ended = forks.run(job(Fault(kind, 1, "train", step=3), ranks=2, strategy=strategy))
    assert (ended.finished, ended.left) == ({}, [])
    assert ended.code != 0
    assert ended.files[0].startswith(f"Rank 1 (encoder 1 and backbone 1) {CAUSES[kind]}")


# ---- as users start jobs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", FIRST, "train", step=3),
        Fault("raise", ENCODER, "train", step=3),
        pytest.param(Fault("kill", ENCODER, "train", step=0), marks=pytest.mark.full),
        pytest.param(Fault("stop", FIRST, "wait", step=3), marks=pytest.mark.full),
        pytest.param(Fault("kill", BACKBONE, "build"), marks=pytest.mark.full),
    ],
    ids=named,
)
def test_ranks_that_lightning_started_end_together(fault, job):
    ended = run_script(job(fault, **settings_for(fault, FRESH_HANG_TIMEOUT)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", ENCODER, "train", step=3),
        pytest.param(Fault("raise", BACKBONE, "train", step=3), marks=pytest.mark.full),
        pytest.param(Fault("stop", FIRST, "train", step=3), marks=pytest.mark.full),
    ],
    ids=named,
)
def test_ranks_that_torchrun_started_end_together(fault, job):
    ended = run_script(job(fault, **settings_for(fault, FRESH_HANG_TIMEOUT)), torchrun=True)
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_control_c_ends_all_ranks(forked, forks, job):
    ended = (forks.run if forked else run_script)(job(interrupt=True))
    assert_all_ended(ended, Fault("interrupt", FIRST, "train"))
    assert "KeyboardInterrupt" in ended.files[FIRST]


# ---- what is no fault -----------------------------------------------------------------------------------------------


def test_a_slow_first_step_and_slow_code_after_fit_are_no_faults(forks, job):
    assert_healthy(forks.run(job(first_step=6.0, afterwards=8.0)))


@pytest.mark.full
def test_a_first_step_of_a_minute_is_no_fault(forks, job):
    assert_healthy(forks.run(job(first_step=60.0)))


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("attempt", range(5))
def test_a_healthy_job_is_never_ended(attempt, workers, forks, job):
    assert_healthy(forks.run(job(workers=workers, strategy={"encoder_ranks": 1, "hang_timeout": 30.0})))


@pytest.mark.full
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_healthy_job_that_a_user_starts_is_never_ended(torchrun, job):
    assert_healthy(run_script(job(), torchrun=torchrun))
