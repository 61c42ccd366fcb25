"""ModelCheckpoint keeps, links, removes and finds directories; a killed training goes on from the last."""

from __future__ import annotations

import pytest

from tests.checkpoint.conftest import seen_by
from tests.checkpoint.test_resume import same
from tests.checkpoint.training import STEPS


@pytest.fixture(scope="module")
def seen(runs):
    folder = runs.job("best", "keep_the_best", 2).check().folder
    return [seen_by(folder, rank) for rank in (0, 1)]


def test_only_the_best_is_kept_and_last_is_a_link_to_it(seen):
    kept = seen[0]["kept"]
    assert kept == ["last.ckpt", seen[0]["link"]]
    assert kept[1] == f"step={STEPS - 1}.ckpt"


def test_best_last_and_a_path_validate_as_the_monitor_said(seen):
    for rank in seen:
        assert rank["best"] == pytest.approx(rank["score"], rel=1e-6)
        assert rank["last"] == rank["last.ckpt"] == rank["best"]


def test_validating_from_a_checkpoint_leaves_the_random_state_alone(seen):
    without, with_checkpoint = seen[0]["drawn"]
    assert without == with_checkpoint


def test_fit_goes_on_from_last(seen):
    assert seen[0]["went on to"] == 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        (0, "before the name"),
        pytest.param(0, "without exchange, between the steps", marks=pytest.mark.full),
        pytest.param(1, "in the middle of its half", marks=pytest.mark.full),
    ],
)
def test_a_training_killed_while_it_saves_goes_on_from_the_checkpoint_before(runs, rank, moment):
    killed = runs.job(f"killed {moment}", "train_until_killed", 2, rank=rank, moment=moment)
    assert killed.codes[rank] == -9
    assert killed.codes[1 - rank] not in (0, -9), killed.log
    assert len(list((killed.folder / "kept").iterdir())) == 2
    went_on = runs.job(f"went on after {moment}", "go_on_after_fault", 2, killed=str(killed.folder)).check().folder
    straight = runs.straight("adamw", "1+1")
    for own in (0, 1):
        one, other = seen_by(straight, own), seen_by(went_on, own)
        assert list(other["steps"]) == list(range(3, STEPS + 1))
        assert same(one["weights"], other["weights"])
        assert same(one["optimizer"], other["optimizer"])
    assert [path.name for path in (killed.folder / "kept").iterdir()] == ["last.ckpt"]
