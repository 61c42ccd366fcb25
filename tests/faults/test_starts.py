"""All ranks end together in jobs as users start them too: by Lightning and by torchrun."""

from __future__ import annotations

import pytest

from tests.faults.fault import Fault
from tests.faults.observing import run_script
from tests.faults.verdict import (
    BACKBONE,
    ENCODER,
    FIRST,
    FRESH_HANG_TIMEOUT,
    assert_all_ended,
    assert_all_told,
    assert_goes_on,
    named,
    settings_for,
)

pytestmark = pytest.mark.full  # `test_faults.py` forks the ranks where Lightning would start them

SECONDS = 600.0
"""The longest that a job may take: on a machine short of memory fresh processes need minutes for imports alone."""


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", FIRST, "train", step=3),
        Fault("raise", ENCODER, "train", step=3),
        Fault("kill", ENCODER, "train", step=0),
        Fault("stop", FIRST, "wait", step=3),
        Fault("kill", BACKBONE, "build"),
    ],
    ids=named,
)
def test_ranks_that_lightning_started_end_together(fault, job):
    ended = run_script(job(fault, deadline=SECONDS, **settings_for(fault, FRESH_HANG_TIMEOUT)))
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", ENCODER, "train", step=3),
        Fault("raise", BACKBONE, "train", step=3),
        Fault("stop", FIRST, "train", step=3),
    ],
    ids=named,
)
def test_ranks_that_torchrun_started_end_together(fault, job):
    ended = run_script(job(fault, deadline=SECONDS, **settings_for(fault, FRESH_HANG_TIMEOUT)), torchrun=True)
    assert_all_ended(ended, fault)
    assert_all_told(ended, fault)


def test_torchrun_restarts_a_killed_job_which_resumes_from_the_last_checkpoint(job):
    fault = Fault("kill", ENCODER, "train", step=5)
    ended = run_script(job(fault, ckpt_path="last", deadline=SECONDS), torchrun=True, restarts=1)
    assert_goes_on(ended, done=4)
    assert ended.left == []
    assert [ended.steps(rank) for rank in (FIRST, BACKBONE)] == [[0, 1, 2, 3, 4, 5, 4, 5]] * 2
