"""Ranks that wait for the rows of one another's experts end together too, and name the one that broke."""

from __future__ import annotations

import pytest

from tests.faults.fault import Fault
from tests.faults.forks import run_forked
from tests.faults.verdict import BACKBONE, FIRST, HANG_TIMEOUT, assert_all_ended, assert_all_told

CASES = [
    (shard, rank, kind)
    for shard in ("replicate", "fsdp")
    for rank, kind in ((BACKBONE, "kill late"), (FIRST, "kill late"), (BACKBONE, "raise"), (BACKBONE, "loop"))
]


@pytest.mark.full
@pytest.mark.parametrize(("shard", "rank", "kind"), CASES)
def test_ranks_that_wait_for_rows_of_experts_end_with_the_one_that_broke(shard, rank, kind, job):
    roles = {"backbone": {"shard": shard, "expert": 2}}
    strategy = {"encoder_ranks": 1, "roles": roles, "hang_timeout": HANG_TIMEOUT}
    ended = run_forked(job(fault := Fault(kind, rank, "train", step=3), strategy=strategy))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)
