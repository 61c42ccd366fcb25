"""A job whose ranks may not open enough files says so before it connects them, or raises the limit itself."""

from __future__ import annotations

import os
import resource

import pytest

from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.runtime.open_files import allow_open_files
from tests.processes import assert_all_good, run_ranks
from tests.runtime.test_strangers import join, rendezvous


def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def come_with_too_low_a_limit(rank, ranks):
    limit(40, 40)
    words = (
        rf"^Rank {rank} may have 40 files and sockets open \(`ulimit -Hn`\) and has \d+; with its connections to the 1 "
        r"other ranks it needs \d+\. Raise the hard limit"
    )
    with pytest.raises(RuntimeError, match=words):
        join(rank)


def test_a_limit_that_is_too_low_is_named_with_both_numbers_before_anybody_connects():
    assert_all_good(run_ranks(come_with_too_low_a_limit, 2, 60, rendezvous()))


def come_with_a_low_limit_of_ones_own(rank, ranks):
    limit(40, 4096)
    job = join(rank)
    job.leave()
    disconnect_groups()


def test_a_limit_that_the_rank_may_raise_is_raised():
    assert_all_good(run_ranks(come_with_a_low_limit_of_ones_own, 2, 120, rendezvous()))


def ask_for_many(rank, ranks):
    opened = len(os.listdir("/proc/self/fd"))
    limit(1024, 4096)
    allow_open_files(0, 64)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 4096)
    allow_open_files(0, 400)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert opened + 8 * 399 < soft <= hard == 4096
    with pytest.raises(RuntimeError, match="to the 599 other ranks it needs"):
        allow_open_files(0, 600)


def test_what_is_needed_grows_with_the_ranks_and_a_limit_that_is_high_enough_stays():
    assert_all_good(run_ranks(ask_for_many, 1, 60))
