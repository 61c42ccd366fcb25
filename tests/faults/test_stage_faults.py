"""Ranks of a pipeline end together too, and say which rank of which stage broke."""

from __future__ import annotations

import pytest

from tests.faults.fault import Fault
from tests.faults.forks import run_forked
from tests.faults.verdict import BACKBONE, FIRST, HANG_TIMEOUT, assert_all_ended, sentences

STAGES = {FIRST: "backbone 0, stage 0", BACKBONE: "backbone 1, stage 1"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "kind", "place", "cause", "schedule"),
    [
        (BACKBONE, "kill late", "train", "died", "1f1b"),
        (FIRST, "kill", "between", "died", "1f1b"),  # it computes no loss, in which it could break
        (BACKBONE, "raise", "train", "failed", "1f1b"),
        (BACKBONE, "raise", "train", "failed", "zb-h1"),
    ],
)
def test_ranks_of_other_stages_end_with_the_one_that_broke_and_name_it(rank, kind, place, cause, schedule, job):
    roles = {"backbone": {"pipeline": 2, "schedule": schedule}}
    strategy = {"encoder_ranks": 1, "roles": roles, "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(fault := Fault(kind, rank, place, step=3), strategy=strategy))
    assert_all_ended(ended, fault)
    told = sentences(ended.said)
    assert told
    assert all(sentence.startswith(f"Rank {rank} ({STAGES[rank]}) {cause}") for sentence in told), told
