"""The ranks of a job, what may happen to them, and what must be true of the job afterwards."""

from __future__ import annotations

import re
from typing import Any

from flowtrain_lightning.pool.between_hosts.hosts_thread import UNREACHABLE_SECONDS
from tests.faults.fault import Fault
from tests.faults.job import Ended
from tests.faults.train import HOST_OF, STEPS
from tests.pool.faults import slowness

FIRST, BACKBONE, ENCODER = 0, 1, 2
"""The ranks of every job: two backbone ranks, the first of which starts the others, and an encoder rank."""
LABELS = {FIRST: "backbone 0", BACKBONE: "backbone 1", ENCODER: "encoder 0"}

CAUSES = {
    "kill": "died (process",
    "kill late": "died (process",
    "stop": "was stopped in phase",
    "raise": "failed",
    "raise twice": "failed",
    "exit": "failed",
    "vanish": "died (process",
    "loop": "made no progress for",
    "sleep": "made no progress for",
    "hold": "was held for",
    "stop worker": "waits for its data loader, for",
    "kill worker": "failed",
    "full disk": "failed",
    "no memory": "failed",
}
"""What the others say of a rank to which this happened."""

SECONDS = 10.0
"""Within which every rank ends after another one's death."""

HANG_TIMEOUT, START_TIMEOUT = 5.0, 10.0
"""After which a rank that is stopped or hangs counts as lost: in training, and before its first step."""

FRESH_HANG_TIMEOUT, SLOW_START = 8.0, 60.0
"""The same for ranks that are healthy but slow, since three interpreters have just started on two busy cores."""

HANGS = ("stop", "loop", "sleep", "hold", "stop worker")
"""Faults that take as long to be noticed."""


def named(fault: Fault) -> str:
    return f"{fault.kind}-{LABELS[fault.rank]}-{fault.place}-{fault.step}".replace(" ", "-")


def settings_for(fault: Fault, hang_timeout: float = HANG_TIMEOUT) -> dict[str, Any]:
    """Limits where the fault is a hang, and workers that load data where they break or must end with their rank."""
    start = START_TIMEOUT if fault.place == "build" else SLOW_START * slowness()
    limits = {"hang_timeout": hang_timeout, "timeout": start} if fault.kind in HANGS else {}
    workers = int(fault.kind.endswith("worker") or fault.place in ("wait", "between"))
    return {"strategy": {"encoder_ranks": 1, **limits}, "workers": workers}


def phase(fault: Fault) -> str:
    """What the broken rank was doing, in the words of the messages."""
    work = "forward of encoder batch 0" if fault.rank == ENCODER else "forward of microbatch 0"
    if (fault.rank, fault.place, fault.step) == (ENCODER, "train", 0):
        return "first forward of the encoder' of step 0"
    return {
        "build": "start up' before the first step",
        "train": f"{work}' of step",
        "wait": "wait for ",
        "between": "between steps' of step",
        "validation": f"{work} (val)' of step",
        "save": "save a checkpoint' of step",
        "load": "between steps' of step",
        "anywhere": "in phase '",
    }[fault.place]


def sentences(text: str) -> list[str]:
    """What flowtrain said of faults."""
    return [line.removeprefix("flowtrain: ") for line in text.splitlines() if line.startswith("flowtrain: Rank")]


def assert_all_ended(ended: Ended, fault: Fault) -> None:
    """Every rank ended soon and with an error, and nothing is left."""
    unseen = {**dict.fromkeys(HANGS, START_TIMEOUT), "lost network": UNREACHABLE_SECONDS}
    limit = slowness() * SECONDS + unseen.get(fault.kind, 0.0)
    assert ended.finished == {}
    assert all(code != 0 for rank, code in ended.codes.items() if rank != fault.rank), ended.codes
    # A rank 0 that asks for code 0 gets it.
    assert ended.code != 0 or (fault.kind in ("exit", "vanish") and fault.rank == FIRST)
    assert set(ended.seconds) == set(LABELS)
    assert max(ended.seconds.values()) < limit, ended.seconds
    assert ended.left == [], ended.left


def assert_all_told(ended: Ended, fault: Fault) -> None:
    """Every survivor said, on stderr and in its file, who is to blame, doing what, and why; and nobody else's name."""
    cause = CAUSES["stop worker"] if fault.place == "load" else CAUSES[fault.kind]
    blame = f"Rank {fault.rank} ({LABELS[fault.rank]}) {cause}"
    told = sentences(ended.said)
    assert len(told) >= len(LABELS) - 1
    assert all(sentence.startswith(blame) for sentence in told), told
    survivors = set(LABELS) - {fault.rank}
    assert set(ended.files) - {fault.rank} == survivors
    for text in ended.files.values():
        assert text.startswith(blame), text
        assert fault.kind.endswith("worker") or phase(fault) in text.splitlines()[0], text
        if fault.kind == "raise":
            assert "in happen" in text, "the traceback of the rank that failed"
            assert "ValueError: a fault of the test" in text
        if fault.kind == "kill worker":
            assert "dataloader" in text.lower()
        if fault.kind == "no memory":
            assert "can't allocate memory" in text
        if fault.kind == "hold":
            assert "keeps the interpreter's lock" in text
        if fault.kind == "stop worker":
            assert re.search(r"Its worker process(es [\d, ]+are| \d+ is) stopped\.", text.splitlines()[0]), text
    if fault.kind in ("loop", "sleep"):
        assert "in happen" in ended.files[fault.rank], "where it hangs"


def assert_told_of_data(ended: Ended) -> None:
    """Every rank said which one read something else than was indexed, and from which file."""
    told = sentences(ended.said)
    assert len(told) >= len(LABELS) - 1
    blamed = {sentence.split(" failed ")[0] for sentence in told}
    assert len(blamed) == 1, told
    assert blamed <= {f"Rank {rank} ({label})" for rank, label in LABELS.items()}, told
    assert len(ended.files) >= len(LABELS) - 1
    for text in ended.files.values():
        assert "train.jsonl" in text, text


def assert_told_of_network(ended: Ended) -> None:
    """Every rank said which one of the other host it cannot reach any more."""
    assert set(ended.files) == set(LABELS)
    for rank, text in ended.files.items():
        others = [other for other in LABELS if HOST_OF[other] != HOST_OF[rank]]
        lost = (f"Rank {other} ({LABELS[other]} on host-{HOST_OF[other]}) can no longer be" for other in others)
        assert text.startswith(tuple(lost)), text


def assert_told_at_start(ended: Ended, fault: Fault) -> None:
    """Rank 0 said which of the ranks that it had started did not come."""
    codes = {"kill": -9, "raise": 1, "vanish": 0}
    how = "was stopped" if fault.kind == "stop" else f"ended with exit code {codes[fault.kind]}"
    blame = f"Rank {fault.rank} ({LABELS[fault.rank]}) {how} during"
    assert [sentence[: len(blame)] for sentence in sentences(ended.said)] == [blame]
    assert ended.files[FIRST].startswith(blame)


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
