"""Runs on two processes that choose their allocation by themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.callbacks import FlowReplan
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.placement.profile import read_profile, write_profile
from tests.forks import Job, read_down, run_jobs, write_down
from tests.lightning.run_context import Recorder, half_lengths
from tests.tiny import TinyVLM, tiny_data, write_records


class Runs:
    """Runs in one folder, which holds their data too.

    Attributes:
        notes: name of a run -> what came out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: dict[str, Any] = {}

    def train(
        self,
        name: str,
        strategy: Any,
        logger: Any = False,
        resume: Path | None = None,
        weights_only: bool | None = None,
        module: Any = None,
        callbacks: Sequence[L.Callback] = (),
    ) -> L.Trainer:
        """Train from the same seed, and note what came out."""
        L.seed_everything(7, verbose=False)
        module = module or TinyVLM()
        recorder = Recorder()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=6 if resume else 4,
            logger=logger,
            callbacks=[recorder, *callbacks],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=self.folder / name,
        )
        trainer.fit(module, tiny_data(self.folder), ckpt_path=resume, weights_only=weights_only)
        losses = [event[2] for event in recorder.events if event[0] == "train"]
        self.notes[name] = {
            "allocation": trainer.strategy.allocation.state_dict(),
            "reason": trainer.strategy.placement_decision.reason,
            "losses": losses,
            "lengths": half_lengths(module),
        }
        return trainer

    def far_too_slow(self, rank: int) -> Path:
        """The profile that was kept, with minutes for a step of the backbone, and a second for one of an optimizer."""
        (kept,) = self.folder.glob(".flowtrain/profile.*.json")
        profile = read_profile(kept)
        costs = {"encoder": CostModel(0.01, 0.0, 0.0), "backbone": CostModel(1.0, 0.0, 0.0)}
        roles = {role: replace(half, cost=costs[role], optimizer_seconds=1.0) for role, half in profile.roles.items()}
        path = self.folder / f"slow-{rank}.json"
        write_profile(replace(profile, roles=roles), path)
        return path


def make_all_runs(folder: Path) -> None:
    """All runs, one after another in the same processes. Started as a command, it is the process that measures."""
    sys.orig_argv[1:] = ["-m", "tests.placement.test_runs", str(folder)]  # of what a fork has no command of its own
    runs = Runs(folder)
    planned = runs.train("planned", "flowtrain", CSVLogger(folder / "planned", name="", version="")).strategy.allocation
    runs.train("kept", "flowtrain", TensorBoardLogger(folder / "kept", name="", version=""))
    runs.train("asked", flow.FlowTrainStrategy(allocation=folder / "planned" / "allocation.yaml"))
    other = default_allocation(2, "colocated" if planned.placement == "separate" else "separate")
    saved, trusted = folder / "saved.ckpt", folder / "trusted.ckpt"
    module = TinyVLM()
    trainer = runs.train("other", flow.FlowTrainStrategy(allocation=other), module=module)
    trainer.save_checkpoint(saved)
    slow = runs.far_too_slow(trainer.global_rank)
    runs.train("again", "flowtrain", module=module)
    runs.train("resumed", "flowtrain", resume=saved)
    module.hparams["folder"] = folder  # which torch reads with weights_only=False alone
    runs.train("with a path", flow.FlowTrainStrategy(allocation=other), module=module).save_checkpoint(trusted)
    runs.train("trusted", "flowtrain", resume=trusted, weights_only=False)
    runs.train("by profile", flow.FlowTrainStrategy(profile=slow), resume=saved, callbacks=[FlowReplan(steps=2)])
    write_down(folder, runs.notes)


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder in which all runs of `train.py` wrote, what each rank noted, and what both printed."""
    folder = tmp_path_factory.mktemp("placement")
    write_records(folder / "runs", 40)
    done = run_jobs(folder, [Job("runs", f"{__name__}:make_all_runs", 2)])["runs"].check()
    return done.folder, read_down(done.folder), done.log


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
        assert re.search("is predicted|simple", kept["allocation_reason"]), "busy machines tell two apart, or do not"
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


if __name__ == "__main__":
    make_all_runs(Path(sys.argv[1]))
