"""What ranks would do apart that they must do together ends all of them in the same step, with a sentence."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.forks import Done, Job, run_jobs
from tests.lightning.wrong_hooks import write_equal_records

SECONDS = 100
"""Less than the 600 seconds after which ranks that wait for each other are ended."""

pytestmark = pytest.mark.timeout(300)


def _train(folder: Path, kind: str, data_folder: Path, layout: str = "1+1") -> Done:
    arguments = {"kind": kind, "data_folder": str(data_folder), "layout": layout}
    return run_jobs(folder, [Job("run", "tests.lightning.wrong_hooks:train", 2, arguments, deadline=SECONDS)])["run"]


def _refused(folder: Path, kind: str, data_folder: Path, layout: str = "1+1") -> str:
    return _told(_train(folder, kind, data_folder, layout))


def _told(done: Done) -> str:
    assert all(code not in (0, -signal.SIGKILL) for code in done.codes), done.log
    return done.log


@pytest.mark.parametrize("layout", ["1+1", "colocated"])
def test_a_collective_inside_a_microbatch_is_refused_before_ranks_wait_in_it(tmp_path, data_folder, layout):
    said = _refused(tmp_path, "Gathering", data_folder, layout)
    assert "`all_gather` was called in a method that works on one microbatch or encoder batch" in said
    assert "Call it in a hook, which all ranks run between steps" in said


def test_a_rank_that_skips_steps_alone_is_told_by_the_rows_of_another_step(tmp_path, data_folder):
    said = _refused(tmp_path, "SkippingAlone", data_folder)
    assert "rows, not" in said
    assert "Ranks are in different steps, so a hook has decided otherwise on this one" in said


def test_and_where_these_are_equally_many_before_anything_is_learned_from_them(tmp_path):
    said = _refused(tmp_path, "SkippingAlone", write_equal_records(tmp_path / "equal"))
    assert "The backbone has ended step 0 of epoch 1, but this rank is in step 2 of epoch 0." in said
    assert "Decide alike on all ranks" in said


def test_features_that_merge_changes_in_place_are_told_of(tmp_path, data_folder):
    assert "It may be features, which `merge` must not change" in _refused(tmp_path, "InPlace", data_folder)


def test_a_buffer_of_no_half_that_one_role_writes_is_refused(tmp_path, data_folder):
    said = _refused(tmp_path, "CountingRows", data_folder)
    assert "Forwards of the encoder write the buffer 'rows', which lies on no half" in said


def test_where_every_rank_has_all_roles_the_first_one_s_counts(tmp_path, data_folder):
    _train(tmp_path, "CountingRows", data_folder, "colocated").check()


@pytest.mark.parametrize("layout", ["1+1", "colocated"])
def test_loaders_that_deal_to_one_rank_are_refused_on_several(tmp_path, data_folder, layout):
    arguments = {"data_folder": str(data_folder), "layout": layout}
    target = "tests.lightning.wrong_hooks:train_from_loaders"
    said = _told(run_jobs(tmp_path, [Job("run", target, 2, arguments, deadline=SECONDS)])["run"])
    assert "it was made before its data module knew the ranks. Give the data module itself" in said
