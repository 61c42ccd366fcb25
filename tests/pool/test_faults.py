"""Which rank is to blame."""

import os

import pytest

from flowtrain_lightning.pool import StatusBoard, StatusPage, fault_sentence, first_fault
from flowtrain_lightning.pool.faults import find_fault


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


def test_the_trail_leads_back_to_the_first_fault(board):
    board.pages[1].blame(2)
    board.dead = {1, 2}
    assert find_fault(board, 0)[0] == 2
    board.dead = {1}  # rank 1 has left because rank 2 hangs
    rank, sentence = find_fault(board, 0)
    assert rank == 2
    assert "held to blame by rank 1 (role 1)" in sentence


def test_what_a_rank_has_found_wrong_with_one_that_hangs_holds_whatever_becomes_of_either(board):
    sentence = fault_sentence(board[2], "was stopped")
    board.pages[1].blame(2, sentence)
    assert find_fault(board, 0) == find_fault(board, 2) == (2, sentence)
    assert find_fault(board, 1) is None  # it has found that itself
    for dead in ({2}, {1, 2}, {1}):
        board.dead = dead
        assert find_fault(board, 0) == (2, sentence)
    board.pages[2].fail("Rank 2 (role 2) made no progress for 5 s. Its main thread was at: ...")
    assert find_fault(board, 0) == (2, "Rank 2 (role 2) made no progress for 5 s. Its main thread was at: ...")


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
    assert "Rank 3" in first_fault(board, 0)
    board.pages[0].fail("connection closed by peer")
    assert board[0].error == ""
    assert board[0].blames == 3
