"""Runs on two processes that choose their allocation by themselves."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.allocator.plan_file import read_plan
from tests.lightning.layout_runs import launch
from tests.tiny import write_records

pytestmark = pytest.mark.timeout(400)

SECONDS = 300
"""The longest wait on a busy machine."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder in which all runs of `train.py` wrote, what they noted, and what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    write_records(folder, 40)
    with launch(
        [sys.executable, "-m", "tests.placement.train", str(folder)], folder / "log", WANDB_SILENT="true"
    ) as run:
        assert run.wait(SECONDS) == 0, (folder / "log").read_text()
    notes = [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(2)]
    return folder, notes, (folder / "log").read_text()


def allocations(notes):
    return {name: note["allocation"] for name, note in notes.items()}


def test_all_ranks_take_the_same_allocation(runs):
    _, notes, _ = runs
    assert allocations(notes[0]) == allocations(notes[1])


def test_the_module_is_measured_once_and_the_next_run_finds_it(runs):
    folder, notes, printed = runs
    assert printed.count("measuring the halves of TinyVLM") == 1
    assert len(list(folder.glob(".flowtrain/profile.*.json"))) == 1
    assert notes[0]["kept"]["allocation"] == notes[0]["planned"]["allocation"]


def test_measuring_leaves_no_trace_in_the_run(runs):
    _, notes, _ = runs
    for what in ("allocation", "losses", "lengths"):
        assert notes[0]["planned"][what] == notes[0]["kept"][what] == notes[0]["asked"][what]
    assert len(notes[0]["planned"]["losses"]) == 4


def test_the_log_says_in_one_block_what_was_chosen_and_why(runs):
    _, _, printed = runs
    block = re.search(
        r"^flowtrain: (separate|colocated): .*\n  because .* is predicted .*\.\n( .*\n|> .*\n){5}", printed, re.M
    )
    assert block is not None, printed
    assert re.search(r"^[> ] colocated x2 +[\d.e-]+ +[\d.e+]+ +\d+ % +\d+ %$", block.group(), re.M)
    assert re.search(r"^[> ] separate 1 \+ 1 +[\d.e-]+ +[\d.e+]+ +\d+ % +\d+ %$", block.group(), re.M)
    assert re.search(r"^  Predicted from the first 6 steps of the data and costs measured on ", block.group(), re.M)


def test_the_allocation_is_written_beside_the_log_and_can_be_passed_back(runs):
    folder, notes, printed = runs
    for name in ("planned", "kept"):
        assert read_plan(folder / name / "allocation.yaml").state_dict() == notes[0][name]["allocation"]
    text = (folder / "planned" / "allocation.yaml").read_text()
    assert "#   because " in text
    assert "# > " in text
    assert notes[0]["asked"]["allocation"] == notes[0]["planned"]["allocation"]
    assert "because it was asked for." in printed


def test_a_run_that_keeps_neither_log_nor_checkpoint_leaves_no_file(runs):
    folder, _, _ = runs
    assert not list(folder.glob("other/**/allocation.yaml"))


def test_loggers_keep_the_choice_and_its_reason(runs):
    folder, _, _ = runs
    for name in ("planned", "kept"):
        kept = yaml.safe_load((folder / name / "hparams.yaml").read_text())
        assert kept["allocation"].split(":")[0] in ("separate", "colocated")
        assert "is predicted" in kept["allocation_reason"]
        assert kept["predicted_step_seconds"] > 0
        assert kept["lr"] == 0.01  # beside the module's own


def test_a_resumed_run_keeps_the_allocation_on_which_it_was_saved(runs):
    folder, notes, printed = runs
    assert notes[0]["resumed"]["allocation"] == notes[0]["other"]["allocation"]
    assert notes[0]["resumed"]["allocation"] != notes[0]["planned"]["allocation"]
    assert f"because {folder / 'saved.ckpt'}, from which the run goes on, was saved on it." in printed
    assert len(notes[0]["resumed"]["losses"]) == 2


def test_so_does_one_from_a_checkpoint_that_must_be_trusted(runs):
    folder, notes, printed = runs
    assert notes[0]["trusted"]["allocation"] == notes[0]["other"]["allocation"]
    assert f"because {folder / 'trusted.ckpt'}, from which the run goes on, was saved on it." in printed


def test_a_profile_that_is_given_plans_anew_even_on_a_resume(runs):
    _, notes, _ = runs
    assert notes[0]["by profile"]["allocation"] == default_allocation(2, "colocated").state_dict()
    assert notes[0]["by profile"]["reason"].startswith("colocated x2 is predicted to be ")
    assert len(notes[0]["by profile"]["losses"]) == 2


def test_measured_times_that_are_far_from_the_plan_lead_to_a_better_one(runs):
    folder, _, printed = runs
    assert "The allocation no longer fits: the backbone takes 0.00 times" in printed
    assert re.search(r"With these times separate 1 \+ 1 is predicted to be [\d.]+ % faster than colocated x2", printed)
    better = read_plan(folder / "by profile" / "better_allocation.yaml")
    assert better == default_allocation(2, "separate")


def test_a_module_stays_where_it_was_built(runs):
    _, notes, printed = runs
    assert notes[0]["again"]["allocation"] == notes[0]["other"]["allocation"]
    assert "because this module was built on it before, in this process." in printed
