"""Status pages: what a rank says of itself, and what others can see of it."""

import os
import time

import pytest

from flowtrain_lightning.pool import State, StatusPage


@pytest.fixture
def page():
    made, descriptor = StatusPage.create(1, "encoder 0")
    os.close(descriptor)
    return made


def test_a_new_page_says_who_it_is(page):
    status = page.read()
    assert (status.rank, status.pid, status.label) == (1, os.getpid(), "encoder 0")
    assert status.state is State.STARTING
    assert (status.phase, status.error, status.blames, status.sigterm) == ("", "", None, False)


def test_it_is_starting_until_its_first_step(page):
    page.enter("start up", -1)
    assert (page.state, page.read().step, page.progress) == (State.STARTING, -1, 1)
    page.enter("begin the step", 0)
    assert page.state is State.RUNNING


def test_after_a_phase_within_another_it_is_in_the_former_but_not_after_an_error(page):
    page.enter("between steps", 4)
    with page.during("wait for all ranks"):
        assert (page.read().phase, page.read().step) == ("wait for all ranks", 4)
    assert (page.read().phase, page.read().step) == ("between steps", 4)
    with pytest.raises(ValueError, match="disk"), page.during("save a checkpoint"):
        raise ValueError("disk")
    assert page.read().phase == "save a checkpoint"


def test_a_rank_in_a_collective_waits_whatever_its_phase(page):
    page.enter("between steps", 4)
    page.tell_main_thread(in_collective=True)
    assert page.read().waits
    page.tell_main_thread()
    assert not page.read().waits
    assert page.progress == 1


def test_a_rank_that_waits_for_its_own_loader_waits_for_nobody_else(page):
    page.enter("wait for the backbone to end the step", 4)
    assert page.read().waits
    page.tell_main_thread(loading=True)
    assert (page.read().waits, page.read().loading) == (False, True)


def test_phases_steps_and_progress_are_seen_by_whoever_maps_it():
    page, descriptor = StatusPage.create(1, "encoder 0")
    seen = StatusPage.attach(1, descriptor)
    page.enter("forward", 7)
    page.enter("wait for gradients", 8)
    status = seen.read()
    assert (status.state, status.phase, status.step, status.progress) == (State.RUNNING, "wait for gradients", 8, 2)
    assert status.waits


def test_texts_are_bounded_and_may_be_of_any_language(page):
    page.enter("Vorwärts ✓ " * 100, 0)
    assert page.read().phase.startswith("Vorwärts ✓ ")
    page.enter("x", 1)
    assert page.read().phase == "x"
    page.fail("early " * 10000 + "the error itself")
    assert page.read().error.endswith("the error itself")
    assert len(page.read().error) <= 16 * 1024


def test_the_first_error_stays(page):
    page.fail("first")
    page.fail("second")
    page.finish()
    assert page.read().error == "first"
    assert page.state is State.FAILED


def test_a_rank_that_blames_another_one_has_not_failed_itself(page):
    page.blame(0)
    page.fail("connection closed")
    page.blame(2)
    assert page.read().blames == 0
    assert page.state is State.STARTING


def test_sigterm_and_heartbeats_are_no_progress(page):
    page.sigterm = True
    page.beat()
    status = page.read()
    assert status.sigterm
    assert status.progress == 0
    assert abs(status.heartbeat_time - time.monotonic()) < 60


def test_a_phase_costs_a_few_microseconds_at_most(page):
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for step in range(500):
            page.enter("forward", step)
        best = min(best, (time.thread_time() - start) / 500)
    assert best < 20e-6  # 1 µs where nothing else runs
