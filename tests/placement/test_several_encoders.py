"""An encoder for images and one for audio: how many ranks each gets is found out by measuring, or said."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import choose_placement, default_allocation, graph_of
from flowtrain_lightning.callbacks import FlowMonitor
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement import module_profile
from flowtrain_lightning.placement.data_profile import profile_data
from flowtrain_lightning.placement.measured import MeasuredCosts, Processors, shared_out
from flowtrain_lightning.placement.probes import load_probes
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, RoleProfile, read_profile, write_profile
from flowtrain_lightning.placement.run_costs import first_steps
from tests.exactness.hearing import Letters, SeeingAndHearing, memory_data
from tests.exactness.layouts import SEED
from tests.forks import Job, read_down, run_jobs, write_down

NAMES = ("encoder_image", "encoder_audio", "backbone")
GRAPH = graph_of(NAMES)
RUNS: dict[str, Any] = {
    "measured": "flowtrain",
    "apart": {"encoder_ranks": {"encoder_audio": 1, "encoder_image": 1}},
    "together": {"placement": "colocated", "roles": {"encoder_audio": {"shard": "fsdp"}}},
    "some only encode": {"placement": "mixed", "encoder_ranks": 1},
}


def profile_of(image: float, audio: float, backbone: float) -> Profile:
    """Seconds of a patch, a frame and a token on one device."""

    def half(seconds: float) -> RoleProfile:
        measured = (Observation(1.0, 1.0, seconds),)
        return RoleProfile(CostModel(seconds, 0.0, 0.0), True, 1000, 4000, 0.0, 0.25, measured)

    origin = ProfileOrigin("a module", "a device", {}, {"precision": "32-true"})
    return Profile(origin, dict(zip(NAMES, map(half, (image, audio, backbone)), strict=True)), 64)


def test_ranks_are_shared_out_by_the_work_of_each_role() -> None:
    assert shared_out(2, {"a": 1.0, "b": 100.0}) == {"a": 1, "b": 1}
    assert shared_out(8, {"a": 1.0, "b": 3.0}) == {"a": 2, "b": 6}
    assert shared_out(5, {"a": 0.0, "b": 1.0}) == {"a": 1, "b": 4}


@pytest.mark.parametrize(("image", "audio"), [(4.0, 0.01), (0.01, 4.0)])
def test_the_encoder_that_has_more_to_do_gets_more_ranks(image: float, audio: float) -> None:
    ranks = 8
    processors = Processors(tuple((rank,) for rank in range(ranks)), 1.0)
    costs = MeasuredCosts(profile_of(image, audio, 0.5), first_steps(memory_data()), ranks, processors, 4, graph=GRAPH)
    choice = choose_placement(costs)
    apart = [found.allocation for found in choice.predictions if found.allocation.placement == "separate"]
    assert set(choice.chosen.idle) == set(NAMES)
    for allocation in apart:
        images, sounds = (len(allocation.ranks[role]) for role in NAMES[:2])
        assert images == 1 if audio > image else sounds == 1
    assert len(apart) == ranks - 2  # of 2 to 7 ranks that only encode


def test_the_rule_gives_every_encoder_a_rank_where_there_are_enough() -> None:
    assert default_allocation(2, graph=GRAPH).placement == "colocated"
    found = default_allocation(16, devices_per_node=8, graph=GRAPH)
    assert found.ranks["encoder_image"] == (6, 14)
    assert found.ranks["encoder_audio"] == (7, 15)


def test_every_half_is_measured_and_a_file_keeps_it(tmp_path: Path) -> None:
    found = module_profile.profile_module(
        SeeingAndHearing(frozen=["audio"]), memory_data(), accelerator="cpu", seconds=0.1, reduction=False, flops=True
    )
    assert tuple(found.roles) == NAMES
    assert found.producers == NAMES[:2]
    assert [half.trains for half in found.roles.values()] == [True, False, True]
    assert all(half.measured and half.flops is not None for half in found.roles.values())
    assert found.roles["encoder_audio"].forward_share == 1.0
    assert found.media_costs == {role: found.roles[role].cost for role in NAMES[:2]}
    write_profile(found, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found
    data = profile_data(memory_data(), found, graph=GRAPH)
    assert set(data.workload.media) == {"image", "audio"}
    assert 0 < data.encoder_share < 1


def test_probes_have_media_of_both_kinds() -> None:
    graph = Letters().role_graph
    probes = load_probes(memory_data(), graph)
    assert {role for probe in probes for role in probe.media} == {"a", "b"}
    for probe in probes:
        for role in ("a", "b"):
            patches = len(probe.media[role].patches) if role in probe.media else 0
            assert patches == np.sum(probe.lengths(role))


def train_all(folder: Path) -> None:
    """All runs, one after another in the same processes. Started as a command, it is the process that measures."""
    sys.orig_argv[1:] = ["-m", "tests.placement.test_several_encoders", str(folder)]
    notes = {name: train(folder / name, strategy) for name, strategy in RUNS.items()}
    write_down(folder, notes)


def train(folder: Path, strategy: Any) -> dict[str, Any]:
    """Trains three steps; returns what was chosen, and the losses."""
    strategy = flow.FlowTrainStrategy(**strategy) if isinstance(strategy, dict) else strategy
    L.seed_everything(SEED, verbose=False)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy == "auto" else 3,
        strategy=strategy,
        max_steps=3,
        limit_val_batches=0,
        logger=CSVLogger(folder, "log", ""),
        callbacks=[losses, *([] if strategy == "auto" else [FlowMonitor(every_n_steps=1, peak_flops=1e12)])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    index = flow.data.IndexConfig(cache_dir=folder)
    trainer.fit(SeeingAndHearing(), memory_data(index=index))
    allocation = getattr(trainer.strategy, "allocation", None)
    return {"losses": losses.found, "allocation": None if allocation is None else allocation.describe()}


class Losses(L.Callback):
    """Notes the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def train_alone(folder: Path) -> None:
    """The same in one process."""
    write_down(folder, train(folder, "auto"))


@pytest.mark.timeout(300)
def test_a_run_needs_no_allocation(tmp_path: Path) -> None:
    jobs = [Job("runs", f"{__name__}:train_all", 3), Job("alone", f"{__name__}:train_alone", 1)]
    done = run_jobs(tmp_path, jobs)
    runs, alone = done["runs"].check(), done["alone"].check()
    expected = read_down(alone.folder)[0]["losses"]
    notes = read_down(runs.folder)
    for name, note in notes[0].items():
        assert note["losses"] == pytest.approx(expected, rel=1e-5), name
        assert all(notes[rank][name]["allocation"] == note["allocation"] for rank in (1, 2))
    shares = {name: share_of_sounds(runs.folder / name / "log" / "metrics.csv") for name in notes[0]}
    assert len({round(share, 6) for share in shares.values()}) == 1, shares  # whoever has how many ranks and shards
    assert "measuring the halves of SeeingAndHearing" in runs.log
    assert "planning failed" not in runs.log
    assert notes[0]["apart"]["allocation"].startswith("separate: encoder_image on rank 1")
    assert notes[0]["together"]["allocation"].startswith("colocated: encoder_image on ranks 0-2 (data 3, replicate);")
    assert "encoder_audio on ranks 0-2 (data 3, fsdp)" in notes[0]["together"]["allocation"]
    assert notes[0]["some only encode"]["allocation"].startswith("mixed: ")


def share_of_sounds(file: Path) -> float:
    """FLOPs of the audio encoder beside those of the image encoder in a step, where both have as many ranks."""
    with file.open(encoding="utf-8") as lines:
        row = next(row for row in csv.DictReader(lines) if row["mfu/encoder_image"])
    return float(row["mfu/encoder_audio"]) / float(row["mfu/encoder_image"])


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
