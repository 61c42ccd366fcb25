"""Who is alive, what the others can see of it, and which rank is to blame."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from flowtrain_lightning.pool import PeerFailed, StatusBoard, StatusPage, fault_sentence, find_fault, first_fault
from flowtrain_lightning.pool.status_board import WakeEvent, blame_fault


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
    other.memory[:8] = process.pid.to_bytes(8, "little")  # as if the process had made it
    return StatusBoard([page, other], [None, os.pidfd_open(process.pid)])


def until(condition, seconds=30.0):
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


def test_a_page_with_any_flipped_bit_can_be_read_and_blames_a_rank_that_exists(sleeper):
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


class Board(StatusBoard):
    """A board on which a test says who died."""

    def __init__(self, ranks):
        pages = []
        for rank in range(ranks):
            page, descriptor = StatusPage.create(rank, f"role {rank}")
            os.close(descriptor)
            page.enter("forward", rank)
            pages.append(page)
        super().__init__(pages, [None] * ranks)
        self.dead = set()

    def died(self, rank):
        return rank in self.dead


@pytest.fixture
def board():
    return Board(4)


def test_nobody_is_to_blame_while_all_are_well(board):
    assert find_fault(board, 0) is None
    assert first_fault(board, 0, wait=0.05) is None


def test_a_sentence_names_rank_role_phase_step_and_cause(board):
    assert fault_sentence(board[2], "died") == "Rank 2 (role 2) died in phase 'forward' of step 2."


def test_a_dead_rank_is_to_blame_unless_it_had_finished(board):
    board.dead = {1, 2}
    board.pages[1].finish()
    rank, sentence = find_fault(board, 0)
    assert rank == 2
    assert "Rank 2 (role 2) died" in sentence


def test_a_rank_that_failed_is_to_blame_with_its_error(board):
    board.pages[3].fail("Traceback: ValueError: bad picture")
    rank, sentence = find_fault(board, 0)
    assert rank == 3
    assert "Rank 3 (role 3) failed in phase 'forward'" in sentence
    assert "ValueError: bad picture" in sentence


def test_of_ranks_that_fail_at_once_all_name_the_first(board):
    for rank in (2, 1, 3):
        board.pages[rank].fail(f"ValueError: of rank {rank}")
    board.dead = {0}  # as a consequence: it lived until after the first fault
    board.pages[0].beat()
    found = [find_fault(board, rank) for rank in range(4)]
    assert found == [found[0]] * 4
    assert found[0][1].startswith("Rank 2 (role 2) failed in phase 'forward' of step 2.")


def test_the_trail_leads_back_to_the_first_fault(board):
    board.pages[1].blame(2)
    board.dead = {1, 2}
    assert find_fault(board, 0)[0] == 2
    board.dead = {1}  # rank 1 has left because rank 2 hangs
    rank, sentence = find_fault(board, 0)
    assert rank == 2
    assert "held to blame by rank 1 (role 1)" in sentence


def test_what_was_found_wrong_with_a_rank_that_hangs_holds_whatever_becomes_of_it(board):
    sentence = fault_sentence(board[2], "was stopped")
    board.pages[1].blame(2, sentence)
    assert find_fault(board, 0) == find_fault(board, 2) == (2, sentence)
    assert find_fault(board, 1) is None  # it has found that itself
    for dead in ({2}, {1, 2}, {1}):
        board.dead = dead
        assert find_fault(board, 0) == (2, sentence)
    board.pages[2].fail("Rank 2 (role 2) made no progress for 5 s. Its main thread was at: ...")
    assert find_fault(board, 0) == (2, "Rank 2 (role 2) made no progress for 5 s. Its main thread was at: ...")


def test_what_one_rank_has_seen_of_another_holds_for_those_that_do_not_see_it_yet(board):
    board.dead = {2}  # lost to rank 1: the other ranks have connections of their own to the host that vanished
    found = blame_fault(board, 1, 2, wait=0.0)
    assert found == (2, "Rank 2 (role 2) died (process " + str(os.getpid()) + " is gone) in phase 'forward' of step 2.")
    board.dead = {1}
    assert find_fault(board, 0) == found


def test_a_rank_that_failed_by_itself_is_to_blame_before_one_that_hangs(board):
    board.pages[3].fail("ValueError: bad picture")
    board.pages[1].blame(2, "Rank 2 (role 2) made no progress for 5 s.")
    assert find_fault(board, 0)[0] == 3


def test_an_error_that_followed_from_a_death_is_not_the_first_fault(board):
    board.pages[1].beat()
    board.dead = {1}
    board.pages[2].fail("connection closed by peer")
    assert find_fault(board, 0)[0] == 1


def test_whoever_asks_for_the_first_fault_blames_it(board):
    board.dead = {3}
    sentence = first_fault(board, 0)
    assert sentence.startswith("Rank 3")
    board.pages[0].fail("connection closed by peer")
    assert board[0].error == sentence
    assert board[0].blames == 3


def test_any_thread_may_wake_and_abort_and_the_first_sentence_stays():
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    event = WakeEvent(descriptor)
    event.check()
    thread = threading.Thread(target=event.abort, args=["Rank 1 died.", 1])
    thread.start()
    thread.join()
    event.abort("Rank 2 died.", 2)
    assert os.eventfd_read(descriptor) == 2
    with pytest.raises(PeerFailed, match=r"Rank 1 died\.") as caught:
        event.check()
    assert caught.value.rank == 1
    event.close()
    event.set()  # nobody waits for it any more


@pytest.fixture
def slow_to_end():
    """A process whose first thread has ended, and the last one ends a second later: so it is when one is killed."""
    program = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1.5,)).start(); "
    process = subprocess.Popen([sys.executable, "-c", program + "ctypes.CDLL(None).syscall(60, 0)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("how", ["its connection closed", "a collective failed"])
def test_a_process_that_is_on_its_way_out_is_awaited_and_told_as_dead(slow_to_end, how):
    board = board_of(slow_to_end)
    assert until(board.pages[1].ending)
    assert not board.died(1)
    told = blame_fault(board, 0, 1, wait=0.0)[1] if how == "its connection closed" else first_fault(board, 0, wait=0.0)
    assert told.startswith(f"Rank 1 (encoder 0) died (process {slow_to_end.pid} is gone)")


def test_a_process_that_goes_on_without_its_connection_is_told_at_once(sleeper):
    board = board_of(sleeper)
    began = time.monotonic()
    assert first_fault(board, 0, wait=0.0) is None
    assert "closed its connection without a goodbye" in blame_fault(board, 0, 1, wait=0.0)[1]
    assert time.monotonic() - began < 2
