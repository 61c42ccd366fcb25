"""All ranks end together, whatever happens to one of them, wherever it is; and nothing is left of the job."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.faults.fault import Fault
from tests.faults.forks import run_forked
from tests.faults.observing import run_script
from tests.faults.trial import LAYOUTS
from tests.faults.verdict import (
    BACKBONE,
    CAUSES,
    ENCODER,
    FIRST,
    HANG_TIMEOUT,
    LABELS,
    assert_all_ended,
    assert_all_told,
    assert_goes_on,
    assert_told_at_start,
    named,
    settings_for,
)

EVERY_CLASS_ONCE = [
    Fault("kill", ENCODER, "train", step=0),
    Fault("kill", BACKBONE, "build"),
    Fault("stop", ENCODER, "wait", step=3),
    Fault("raise", FIRST, "validation", step=2),
    Fault("full disk", BACKBONE, "save", step=4),
    Fault("raise twice", ENCODER, "train", step=3),
    Fault("loop", ENCODER, "train", step=3),
    Fault("exit", BACKBONE, "between", step=3),
    Fault("vanish", ENCODER, "train", step=3),
    Fault("kill worker", ENCODER, "train", step=2),
    Fault("stop worker", BACKBONE, "train", step=2),
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
            ("loop", "sleep", "hold", "exit", "vanish", "kill worker", "stop worker"),
            (FIRST, BACKBONE, ENCODER),
            ("train", "between"),
        )
    ]
    + [Fault("hold", rank, place, step) for rank in LABELS for place, step in (("wait", 3), ("save", 4), ("build", 0))]
    + [Fault(kind, ENCODER, "load", step=2) for kind in ("sleep", "loop")]
    + [Fault("full disk", rank, "save", step=4) for rank in (FIRST, BACKBONE, ENCODER)]
    + [Fault("sleep", rank, "build") for rank in (FIRST, BACKBONE, ENCODER)]
)


@pytest.mark.parametrize("fault", EVERY_CLASS_ONCE, ids=named)
def test_all_ranks_end_in_time_and_say_who_where_and_why(fault, job):
    ended = run_forked(job(fault, **settings_for(fault)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in MATRIX if fault not in EVERY_CLASS_ONCE], ids=named)
def test_so_they_do_after_any_fault_on_any_rank_at_any_place(fault, job):
    ended = run_forked(job(fault, **settings_for(fault)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.parametrize(
    "rank", [BACKBONE, pytest.param(FIRST, marks=pytest.mark.full), pytest.param(ENCODER, marks=pytest.mark.full)]
)
def test_after_a_kill_in_a_checkpoint_fit_goes_on_from_the_one_before(rank, job):
    assert_all_ended(run_forked(job(fault := Fault("kill", rank, "save", step=4))), fault)
    assert_goes_on(run_forked(job(ckpt_path="last")), done=2)


@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        (ENCODER, "kill"),
        (ENCODER, "vanish"),
        pytest.param(BACKBONE, "stop", marks=pytest.mark.full),
        *(pytest.param(r, k, marks=pytest.mark.full) for r in LABELS for k in ("kill", "raise", "vanish")),
    ],
)
def test_a_rank_that_ends_before_it_has_met_the_others_ends_them(rank, kind, job):
    strategy = {"encoder_ranks": 1, "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(fault := Fault(kind, rank, "start"), strategy=strategy))
    assert (ended.left, ended.finished) == ([], {})
    assert ended.code != 0 or (rank, kind) == (FIRST, "vanish")
    if rank != FIRST:
        assert_told_at_start(ended, fault)


def test_the_rank_that_starts_the_others_is_named_when_it_is_stopped_meanwhile(job):
    strategy = {"encoder_ranks": 1, "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(Fault("stop starter", ENCODER, "start"), strategy=strategy))
    assert (ended.left, ended.finished, ended.code) == ([], {}, -signal.SIGKILL)
    for rank in (BACKBONE, ENCODER):
        assert ended.files[rank].startswith("Rank 0 (backbone 0) was stopped during start-up"), ended.files


@pytest.mark.parametrize(
    "kind", ["raise", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("kill", "stop", "hold"))]
)
def test_colocated_ranks_end_together_too(kind, job):
    strategy = {"placement": "colocated", "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(Fault(kind, 1, "train", step=3), ranks=2, strategy=strategy))
    assert (ended.finished, ended.left) == ({}, [])
    assert ended.code != 0
    assert ended.files[0].startswith(f"Rank 1 (encoder 1 and backbone 1) {CAUSES[kind]}")


@pytest.mark.parametrize(
    ("rank", "label"),
    [(2, "encoder 2"), pytest.param(1, "encoder 1 and backbone 1", marks=pytest.mark.full)],
    ids=["that only encodes", "of the backbone"],
)
def test_mixed_ranks_end_together_too(rank, label, job):
    strategy = {"placement": "mixed", "encoder_ranks": 1, "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(fault := Fault("kill", rank, "train", step=3), strategy=strategy))
    assert_all_ended(ended, fault)
    for text in (text for other, text in ended.files.items() if other != rank):
        assert text.startswith(f"Rank {rank} ({label}) {CAUSES['kill']}")


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("fsdp", "hold"),
        *(pytest.param("fsdp", kind, marks=pytest.mark.full) for kind in ("kill", "raise", "loop")),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in itertools.product(("tensor", "context"), ("kill", "raise", "loop", "hold"))
        ),
    ],
)
def test_ranks_that_wait_in_a_collective_for_another_end_with_it(layout, kind, job):
    strategy = {"encoder_ranks": 1, **LAYOUTS[layout], "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(fault := Fault(kind, BACKBONE, "train", step=3), strategy=strategy))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_control_c_ends_all_ranks(forked, job):
    ended = (run_forked if forked else run_script)(job(interrupt=True))
    assert_all_ended(ended, Fault("interrupt", FIRST, "train"))
    assert "KeyboardInterrupt" in ended.files[FIRST]
