"""Who is alive, and what the others can see of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from flowtrain_lightning.pool import StatusBoard, StatusPage
from flowtrain_lightning.pool.faults import find_fault


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def board_of(process):
    page, descriptor = StatusPage.create(0, "backbone 0")
    other, other_descriptor = StatusPage.create(1, "encoder 0")
    for number in (descriptor, other_descriptor):
        os.close(number)
    other._words[0] = process.pid  # as if the process had made it
    return StatusBoard([page, other], [None, os.pidfd_open(process.pid)])


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_death_is_seen_at_once(sleeper):
    board = board_of(sleeper)
    assert not board.died(1)
    sleeper.send_signal(signal.SIGKILL)
    assert until(lambda: board.died(1))
    assert not board.stopped(1)


def test_a_stopped_process_is_no_dead_one_and_can_be_killed(sleeper):
    board = board_of(sleeper)
    assert not board.stopped(1)
    sleeper.send_signal(signal.SIGSTOP)
    assert until(lambda: board.stopped(1))
    assert not board.died(1)
    board.kill(1)
    assert until(lambda: board.died(1))
    board.kill(1)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_closed_board_can_still_be_read(sleeper):
    board = board_of(sleeper)
    board.close()
    assert not board.died(1)
    assert board[1].label == "encoder 0"


def test_a_page_with_any_flipped_bit_can_be_read_and_blames_no_rank_that_does_not_exist(sleeper):
    board = board_of(sleeper)
    page = board.pages[1]
    page.enter("forward", 3)
    page.blame(0)
    sleeper.kill()
    sleeper.wait()
    for bit in (*range(16 * 64), *range(1024 * 8, 1024 * 8 + 200), *range(2048 * 8, 2048 * 8 + 200)):
        page.memory[bit // 8] ^= 1 << bit % 8
        board.stopped(1)
        found = find_fault(board, 0)
        assert found is None or (found[0] in (0, 1) and found[1].startswith(f"Rank {found[0]} (")), bit
        page.memory[bit // 8] ^= 1 << bit % 8
