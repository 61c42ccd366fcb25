"""A run goes on from a checkpoint as if it had never stopped: on its own layout, on another, under plain Lightning."""

from __future__ import annotations

import pytest
import torch

from flowtrain_lightning.checkpoint import read_allocation, read_checkpoint
from flowtrain_lightning.parallel.gradients import local_part
from tests.checkpoint.conftest import seen_by
from tests.checkpoint.training import LAYOUTS, SAVED_AT, SEARCHED, STAGED, STEPS

ASKED_AFTER = 4
"""The training step before a validation in which a run is asked to end."""


def same(one, other):
    """Whether two nested structures are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        one, other = local_part(one), local_part(other)  # of shards, what this rank held
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def after_the_break(records):
    return {step: record for step, record in records.items() if step > SAVED_AT}


def assert_same_losses(straight, resumed, first=SAVED_AT + 1):
    """Losses, learning rates and validation losses from step ``first`` on agree to 1e-5."""
    assert list(resumed["steps"]) == list(range(first, STEPS + 1))
    for step, record in resumed["steps"].items():
        assert record["loss"] == pytest.approx(straight["steps"][step]["loss"], rel=1e-5)
        assert record["rates"] == straight["steps"][step]["rates"]
    expected = {step: loss for step, loss in straight["validations"].items() if step >= first}
    assert resumed["validations"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("dropout", "1+2"),
        ("frozen", "1+1"),
        ("adagrad", "1+1"),
        ("frozen", "mixed 1+2"),
        pytest.param("dropout", "1+1", marks=pytest.mark.full),
        pytest.param("sgd", "1+1", marks=pytest.mark.full),
        pytest.param("dropout", "mixed 1+2", marks=pytest.mark.full),
        pytest.param("dropout", "2+1", marks=pytest.mark.full),
        pytest.param("dropout", "colocated", marks=pytest.mark.full),
        pytest.param("dropout", "searched order", marks=pytest.mark.full),
        pytest.param("dropout", "searched order, limited", marks=pytest.mark.full),
        pytest.param("frozen", "1+2", marks=pytest.mark.full),
        pytest.param("sgd", "2+1", marks=pytest.mark.full),
        *(pytest.param("four blocks", layout, marks=pytest.mark.full) for layout in STAGED),
    ],
)
def test_on_the_same_layout_a_resumed_run_equals_one_without_a_break_to_the_bit(runs, case, layout):
    straight = runs.straight(case, layout)
    resumed = runs.resumed(straight / f"step{SAVED_AT}.ckpt", case, layout)
    for rank in range(LAYOUTS[layout][0]):
        one, other = seen_by(straight, rank), seen_by(resumed, rank)
        assert same(after_the_break(one["steps"]), other["steps"])
        assert same(after_the_break(one["validations"]), other["validations"])
        assert same(one["weights"], other["weights"])
        assert same(one["optimizer"], other["optimizer"])
        assert same(one["scheduler"], other["scheduler"])
        assert one["epoch"] == other["epoch"]


@pytest.mark.full
def test_a_run_goes_on_from_one_order_of_stages_in_another_and_whole(runs):
    case = "four blocks, no dropout"  # whose masks would be those of the stages
    straight = runs.straight(case, "stages, zb-v")
    on_the_way = runs.resumed(straight / f"step{SAVED_AT}.ckpt", case, "stages, virtual")
    whole = runs.resumed(on_the_way / f"step{SAVED_AT + 2}.ckpt", case, "1+1", saves_at=SAVED_AT + 3)
    for rank in range(2):
        assert_same_losses(seen_by(straight), seen_by(whole, rank), first=SAVED_AT + 3)


@pytest.mark.full
def test_a_checkpoint_says_that_the_order_was_searched(runs):
    checkpoint = runs.straight("dropout", "searched order") / f"step{SAVED_AT}.ckpt"
    assert read_allocation(checkpoint) == SEARCHED


@pytest.mark.full
def test_under_auto_everything_but_the_draws_of_user_code_is_equal_to_the_bit_too(runs):
    straight = runs.straight("dropout", "auto")
    one, other = seen_by(straight), seen_by(runs.resumed(straight / f"step{SAVED_AT}.ckpt", "dropout", "auto"))
    for record in (*one["steps"].values(), *other["steps"].values()):
        del record["drawn"]  # plain Lightning keeps no random states
    assert same(after_the_break(one["steps"]), other["steps"])
    assert same((one["weights"], one["optimizer"]), (other["weights"], other["optimizer"]))


def test_a_frozen_encoder_has_worked_ahead_when_the_checkpoint_is_made(runs):
    straight = runs.straight("frozen", "1+1")
    assert seen_by(straight, rank=1)["ahead"] > 0


def test_mixed_ranks_that_only_encode_work_ahead_where_the_encoder_is_frozen(runs):
    straight = runs.straight("frozen", "mixed 1+2")
    assert seen_by(straight, rank=2)["ahead"] > 0
    assert seen_by(straight, rank=1)["ahead"] == 0


@pytest.mark.full
def test_a_mixed_run_goes_on_colocated_then_in_one_process_and_then_mixed_again(runs):
    straight = runs.straight("adamw", "mixed 1+2")
    colocated = runs.resumed(straight / f"step{SAVED_AT}.ckpt", "adamw", "colocated")
    alone = runs.resumed(colocated / f"step{SAVED_AT + 2}.ckpt", "adamw", "auto", saves_at=SAVED_AT + 3)
    back = runs.resumed(alone / f"step{SAVED_AT + 3}.ckpt", "adamw", "mixed 1+2")
    for rank in range(3):
        assert_same_losses(seen_by(straight), seen_by(back, rank), first=SAVED_AT + 4)


LONGER = [pytest.param(layout, marks=pytest.mark.full) for layout in ("colocated", "ddp")]


@pytest.mark.parametrize("layout", ["2+1", "auto", *LONGER, pytest.param("alone", marks=pytest.mark.full)])
def test_on_another_layout_the_losses_are_the_same(runs, layout):
    straight = runs.straight("adamw", "1+1")
    resumed = runs.resumed(straight / f"step{SAVED_AT}.ckpt", "adamw", layout)
    for rank in range(LAYOUTS[layout][0]):
        assert_same_losses(seen_by(straight), seen_by(resumed, rank))


@pytest.mark.parametrize("layout", ["2+1", pytest.param("auto", marks=pytest.mark.full), *LONGER])
def test_and_so_they_are_on_the_way_back(runs, layout):
    straight = runs.straight("adamw", "1+1")
    there = runs.resumed(straight / f"step{SAVED_AT}.ckpt", "adamw", layout)
    back = runs.resumed(there / f"step{SAVED_AT + 2}.ckpt", "adamw", "1+1")
    assert_same_losses(seen_by(straight), seen_by(back), first=SAVED_AT + 3)


def test_an_exported_file_goes_on_under_auto_with_the_same_losses(runs):
    straight = runs.straight("adamw", "1+1")
    file = runs.exported(straight / f"step{SAVED_AT}.ckpt")
    assert_same_losses(seen_by(straight), seen_by(runs.resumed(file, "adamw", "auto")))


def test_momentum_and_settings_per_group_pass_to_another_layout(runs):
    straight = runs.straight("sgd", "1+1")
    resumed = runs.resumed(straight / f"step{SAVED_AT}.ckpt", "sgd", "auto")
    assert_same_losses(seen_by(straight), seen_by(resumed))


def test_a_checkpoint_can_be_made_when_the_run_is_over(runs):
    straight = runs.straight("adamw", "1+1")
    ended = read_checkpoint(straight / "ended.ckpt")
    assert ended["global_step"] == STEPS
    own = {**seen_by(straight, 0)["weights"], **seen_by(straight, 1)["weights"]}
    assert same(own, dict(ended["state_dict"]))


def test_another_module_is_refused_with_the_names_that_differ(runs):
    checkpoint = runs.straight("sgd", "1+1") / f"step{SAVED_AT}.ckpt"
    done = runs.job("another module", "resume_another_module", 1, checkpoint=str(checkpoint)).check()
    said = (done.folder / "said.txt").read_text()
    assert said.startswith("The checkpoint does not fit TrainedVLM: missing ['encoder.heads.1.bias', 'encoder.heads.1.")
    assert "unknown nothing. Build the module as it was saved, or set strict_loading=False." in said


@pytest.mark.parametrize(
    ("case", "max_steps"),
    [("frozen", STEPS), ("dropout", ASKED_AFTER)],
    ids=["a validation in mid-epoch", "the last validation"],
)
def test_a_run_asked_to_end_in_a_validation_ends_after_it_and_resumes_to_the_bit(runs, case, max_steps):
    straight = runs.straight(case, "1+1")
    arguments = {"case": case, "rank": 1, "step": ASKED_AFTER, "max_steps": max_steps}
    asked = runs.job(f"{case} asked of {max_steps}", "train_until_asked_to_end", 2, **arguments).check().folder
    resumed = runs.resumed(asked / "preempted.ckpt", case, "1+1")
    for rank in range(2):
        one, before, after = (seen_by(folder, rank) for folder in (straight, asked, resumed))
        assert max(before["steps"]) == max(before["validations"]) == ASKED_AFTER
        assert same(one["steps"], {**before["steps"], **after["steps"]})
        assert same(one["validations"], {**before["validations"], **after["validations"]})
        assert min(after["steps"]) == ASKED_AFTER + 1
        for kept in ("weights", "optimizer", "scheduler", "epoch"):
            assert same(one[kept], after[kept])
