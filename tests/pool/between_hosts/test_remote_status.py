"""What is known of ranks on other hosts."""

import os
import random
import time
from contextlib import suppress

import pytest

from flowtrain_lightning.pool import PoolError, State, StatusPage
from flowtrain_lightning.pool.between_hosts.remote_status import RemoteStatusPage, decode_status, encode_status


@pytest.fixture
def page():
    made, descriptor = StatusPage.create(3, "encoder 2")
    os.close(descriptor)
    return made


@pytest.fixture
def copy():
    made = RemoteStatusPage(3, "encoder 2")
    yield made
    os.close(made.ended)


def test_a_copy_says_what_the_page_says(page, copy):
    page.begin_step()
    page.enter("forward of encoder batch 5", 7)
    page.sigterm = True
    page.fail("ValueError: bad picture ü")
    copy.update(decode_status(3, 8, encode_status(page.read())))
    sent, known = page.read(), copy.read()
    fields = ("rank", "pid", "label", "state", "phase", "step", "progress", "heartbeat", "sigterm", "begun", "error")
    for name in fields:
        assert getattr(known, name) == getattr(sent, name)
    assert (copy.state, copy.progress) == (State.FAILED, 1)
    assert abs(known.failed_time - sent.failed_time) < 1
    assert abs(known.heartbeat_time - sent.heartbeat_time) < 1


def test_whom_a_rank_blames_is_known(page):
    page.blame(5)
    assert decode_status(3, 8, encode_status(page.read())).blames == 5
    with pytest.raises(PoolError, match="no rank writes"):
        decode_status(3, 4, encode_status(page.read()))


def test_a_rank_that_is_lost_says_so_once(copy):
    copy.lose("died")
    copy.lose("can no longer be reached")
    assert copy.read().lost == "died"
    assert os.eventfd_read(copy.ended) == 1


def test_a_rank_counts_as_stopped_when_it_has_been_silent(copy, monkeypatch):
    assert not copy.stopped()
    later = time.monotonic() + 10
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert copy.stopped()


def test_damaged_pages_are_refused_or_differ_but_break_nothing(page):
    page.enter("forward", 1)
    message, choose = encode_status(page.read()), random.Random(0)
    for length in range(len(message)):
        with pytest.raises(PoolError):
            decode_status(3, 8, message[:length])
    for _ in range(2000):
        damaged = bytearray(message)
        damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        with suppress(PoolError):
            assert decode_status(3, 8, damaged).rank == 3
