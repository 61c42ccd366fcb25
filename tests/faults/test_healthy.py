"""What is no fault ends no job: a slow start, slow code after the run, a run that just goes well."""

from __future__ import annotations

import pytest

from tests.faults.forks import run_forked
from tests.faults.observing import run_script
from tests.faults.verdict import (
    assert_healthy,
)


def test_a_slow_first_step_and_slow_code_after_fit_are_no_faults(job):
    assert_healthy(run_forked(job(first_step=3.0, afterwards=6.0)))


@pytest.mark.full
def test_a_first_step_of_a_minute_is_no_fault(job):
    assert_healthy(run_forked(job(first_step=60.0)))


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("attempt", range(5))
def test_a_healthy_job_is_never_ended(attempt, workers, job):
    assert_healthy(run_forked(job(workers=workers, strategy={"encoder_ranks": 1, "hang_timeout": 30.0})))


@pytest.mark.full
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_healthy_job_that_a_user_starts_is_never_ended(torchrun, job):
    assert_healthy(run_script(job(), torchrun=torchrun))
