"""Weights that are needed elsewhere than where they stand: found by the check, and refused where a stage lacks them."""

from __future__ import annotations

import pytest

from flowtrain_lightning.packing_check import report_of
from tests.exactness.modules import Deep, Projecting
from tests.forks import Job, run_jobs
from tests.packing_check.right_modules import LeavesTerms, ReadsAgain
from tests.tiny import TinyVLM, tiny_data, write_records

pytestmark = pytest.mark.checks_packing


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path, 16)
    return tiny_data(tmp_path)


def test_where_weights_are_needed_as_they_stand_nothing_is_found(data):
    for module in (Deep(), TinyVLM()):
        report = report_of(module, data)
        assert report.needed_weights == report.findings == []


def test_what_is_read_again_is_found_by_block_and_weight(data):
    report = report_of(ReadsAgain(), data)
    place, embed = "backbone.place.weight", "backbone.embed.weight"
    assert report.needed_weights == [(1, place), (2, place), (-1, place), (1, embed), (2, embed)]
    assert report.findings == [], "packing changes nothing"


def test_so_is_what_stands_behind_the_blocks_and_is_needed_before_them(data):
    found = report_of(Projecting(), data).needed_weights
    assert found == [(0, "projector.1.bias"), (0, "projector.1.weight")]


def test_so_is_a_term_of_the_loss_that_a_block_leaves_as_an_attribute(data):
    report = report_of(LeavesTerms(), data)
    assert [block for block, _ in report.needed_weights] == [-1] * 3  # the last of four stands where the loss is
    assert [weight.split(".")[:3] for _, weight in report.needed_weights] == [
        ["backbone", "block", "norm"],
        ["backbone", "more", "0"],
        ["backbone", "more", "1"],
    ]
    assert report.findings == []


def test_a_fit_in_stages_refuses_it_in_setup_on_every_rank(tmp_path):
    strategy = {"encoder_ranks": 1, "roles": {"backbone": {"pipeline": 2}}}
    arguments = {"module": "ReadsAgain", "strategy": strategy, "ranks": 3}
    done = run_jobs(tmp_path, [Job("fit", "tests.packing_check.fitting:fit", 3, arguments)])["fit"].check()
    texts = {(done.folder / f"refused{rank}.txt").read_text() for rank in range(3)}
    assert len(texts) == 1
    assert texts.pop().startswith(
        "The backbone has pipeline 2, but 'backbone.place.weight' is needed beside the hidden"
    )
