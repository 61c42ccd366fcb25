"""A module that generates: its halves are measured, its steps simulated, and its ranks found without an allocation."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import (
    Allocation,
    AllocationError,
    Layout,
    choose_placement,
    default_allocation,
    graph_of,
)
from flowtrain_lightning.callbacks import FlowMonitor
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.packing.simulator import simulate_steps
from flowtrain_lightning.packing.step_work import PassTimes
from flowtrain_lightning.placement.data_profile import profile_data
from flowtrain_lightning.placement.lane_work import lane_work
from flowtrain_lightning.placement.layout_costs import ProfiledLayoutCosts
from flowtrain_lightning.placement.measured import MeasuredCosts, Processors
from flowtrain_lightning.placement.module_profile import profile_module
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, RoleProfile, read_profile, write_profile
from flowtrain_lightning.placement.run_costs import first_steps
from flowtrain_lightning.placement.simulation import plan_on, simulate
from tests.exactness.drawing import Drawing, drawings, write_drawings
from tests.exactness.layouts import SEED
from tests.forks import Job, read_down, run_jobs, write_down
from tests.placement.test_simulation import draw_sizes

NAMES = ("encoder", "backbone", "generator")
RANKS = 3


def profile_of(encoder: float, backbone: float, generator: float) -> Profile:
    """Seconds of a patch, a token and a patch that is drawn, on one device."""

    def half(seconds: float) -> RoleProfile:
        measured = (Observation(1.0, 1.0, seconds),)
        return RoleProfile(CostModel(0.0, seconds, 0.0), True, 1000, 4000, 0.0, 0.25, measured)

    origin = ProfileOrigin("a module", "a device", {}, {"precision": "32-true"})
    halves = dict(zip(NAMES, map(half, (encoder, backbone, generator)), strict=True))
    return Profile(origin, halves, 64, behind=("generator",))


def allocation_of(counts: tuple[int, int, int], sharded: set[str], *, colocated: bool) -> Allocation:
    """Ranks of encoder, backbone and generator, of which some share weights."""
    encoders, backbones, generators = (counts[1],) * 3 if colocated else counts
    first = {"backbone": 0, "encoder": backbones, "generator": backbones + encoders}
    sizes = {"encoder": encoders, "backbone": backbones, "generator": generators}
    ranks = {
        role: tuple(range(n)) if colocated else tuple(range(first[role], first[role] + n)) for role, n in sizes.items()
    }
    layouts = {role: Layout(n, shard="fsdp" if role in sharded else "replicate") for role, n in sizes.items()}
    return Allocation("colocated" if colocated else "separate", layouts, ranks)


def some_drawn(draw: np.random.Generator, samples: int) -> Any:
    sizes = draw_sizes(draw, samples)
    drawn = draw.random(len(sizes.media_rows)) < draw.choice([0.0, 0.3, 1.0])
    return replace(sizes, media_modality=np.where(drawn, "generated", "image"))


class EvenCosts:
    """One second for a token or patch in each direction, and one for each end of a step."""

    def __init__(self, *, encoder_trains: bool) -> None:
        self.encoder_trains = encoder_trains

    def batch(self, role: str, lengths: Any) -> PassTimes:
        seconds = float(lengths.sum())
        return PassTimes(seconds, seconds if role != "encoder" or self.encoder_trains else 0.0)

    def end_of_step(self, role: str) -> tuple[float, float]:
        return 1.0, 1.0

    def on_the_way(self, role: str, lengths: Any) -> float:
        return 0.0


@settings(max_examples=60, deadline=None)
@given(
    counts=st.tuples(*[st.integers(1, 3)] * 3),
    sharded=st.sets(st.sampled_from(NAMES)),
    colocated=st.booleans(),
    trains=st.booleans(),
    kept=st.integers(0, 4),
    samples=st.integers(1, 16),
    seed=st.integers(0, 2**16),
)
def test_no_rank_is_ever_stuck(counts, sharded, colocated, trains, kept, samples, seed):
    allocation = allocation_of(counts, sharded, colocated=colocated)
    draw = np.random.default_rng(seed)
    plans = [plan_on(allocation, some_drawn(draw, samples), np.arange(samples), 100) for _ in range(2)]
    works, rules = lane_work(plans, allocation, EvenCosts(encoder_trains=trains), kept)
    played = simulate_steps(works, rules)
    done = [(span.step, span.work, span.rank) for span in played.spans]
    assert len(done) == len(set(done))
    for number, plan in enumerate(plans):
        drawn = {
            span.work.batch[1:] for span in played.spans if span.step == number and span.work.batch.role == NAMES[2]
        }
        assert len(drawn) == sum(map(len, plan.batches[NAMES[2]]))


def test_the_backbone_goes_on_while_others_draw_from_the_microbatch_before() -> None:
    """Two microbatches, each of a second forward and two backward, and each with a picture drawn in two and four."""
    allocation = allocation_of((1, 1, 1), set(), colocated=False)
    tokens = np.array([10, 10])
    sizes = draw_sizes(np.random.default_rng(0), 2)
    sizes = replace(
        sizes,
        tokens=tokens,
        targets=tokens,
        media_start=np.array([0, 1, 2]),
        media_rows=np.array([2, 2]),
        media_patches=np.array([10, 10]),
        media_modality=np.array(["generated"] * 2),
    )

    class Costs(EvenCosts):
        def batch(self, role: str, lengths: Any) -> PassTimes:
            return PassTimes(2.0, 4.0) if role == "generator" else PassTimes(1.0, 2.0)

        def end_of_step(self, role: str) -> tuple[float, float]:
            return 0.0, 0.0

    one_each = ((np.array([0]), np.array([1])),)
    plans = [plan_on(allocation, sizes, np.arange(2), 10, microbatches=one_each)]
    works, rules = lane_work(plans, allocation, Costs(encoder_trains=True), 4)
    spans = simulate_steps(works, rules).spans
    ends = {(span.work.batch.role, span.work.kind, span.work.batch.number): span.end for span in spans}
    assert [ends["backbone", "forward", n] for n in (0, 1)] == [1.0, 2.0]
    assert [ends["generator", "backward", n] for n in (0, 1)] == [7.0, 13.0]
    assert [ends["backbone", "backward", n] for n in (0, 1)] == [9.0, 15.0]


def test_the_shares_of_a_simulated_step_are_told_for_every_role() -> None:
    allocation = allocation_of((1, 2, 1), set(), colocated=False)
    sizes = some_drawn(np.random.default_rng(5), 12)
    plans = [plan_on(allocation, sizes, np.arange(12), 100)]
    found = simulate(plans, allocation, ProfiledLayoutCosts(profile_of(1.0, 1.0, 1.0), allocation), 4)
    assert set(found.shares) == set(NAMES)
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in found.shares.values())
    assert {one.name for one in found.activities if one.role == "generator"} >= {"forward", "backward"}


def measured_data(folder: Path, module: Drawing) -> FlowDataModule:
    data = drawings(folder)
    data.read_as(module)  # which says that images may be generated
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawings")
    write_drawings(folder)
    return folder


def test_every_half_is_measured_and_a_file_keeps_it(folder: Path, tmp_path: Path) -> None:
    module = Drawing()
    data = measured_data(folder, module)
    found = profile_module(module, data, accelerator="cpu", seconds=0.1, reduction=False, flops=True)
    assert (tuple(found.roles), found.trunk, found.producers) == (NAMES, "backbone", ("encoder",))
    assert all(half.measured and half.flops is not None and half.trains for half in found.roles.values())
    assert 0 < found.roles["generator"].forward_share < 1
    write_profile(found, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found
    lengths = profile_data(data, found, graph=module.role_graph)
    assert set(lengths.workload.media) == {"image", "generated"}
    assert 0 < lengths.encoder_share < 1


def test_ranks_that_draw_may_be_named_like_those_that_encode() -> None:
    graph = graph_of(NAMES)
    named = default_allocation(8, "separate", {"encoder": 1, "generator": 3}, graph=graph)
    assert {role: len(ranks) for role, ranks in named.ranks.items()} == {"encoder": 1, "backbone": 4, "generator": 3}
    by_rule = default_allocation(8, "separate", {"encoder": 1}, graph=graph)
    assert len(by_rule.ranks["generator"]) == 2
    with pytest.raises(AllocationError, match="at least 1 rank, and no other one, but generator"):
        default_allocation(8, "separate", {"generator": 3}, graph=graph)


@pytest.mark.parametrize(("encoder", "generator"), [(4.0, 0.01), (0.01, 4.0)])
def test_the_role_that_has_more_to_do_gets_more_ranks(folder: Path, encoder: float, generator: float) -> None:
    ranks = 8
    processors = Processors(tuple((rank,) for rank in range(ranks)), 1.0)
    profile = profile_of(encoder, 0.5, generator)
    steps = first_steps(measured_data(folder, Drawing()))
    costs = MeasuredCosts(profile, steps, ranks, processors, 4, graph=graph_of(NAMES))
    choice = choose_placement(costs)
    apart = [found.allocation for found in choice.predictions if found.allocation.placement == "separate"]
    assert {found.allocation.placement for found in choice.predictions} == {"separate", "colocated"}
    assert set(choice.chosen.idle) == set(NAMES)
    assert len(apart) == ranks - 2  # of 2 to 7 ranks that do not read
    for allocation in apart:
        encoding, drawing = (len(allocation.ranks[role]) for role in ("encoder", "generator"))
        assert drawing == 1 if encoder > generator else encoding == 1


def train_without_allocation(folder: Path, *, data: str) -> None:
    """Trains, with ranks as they are found. Started as a command, it is the process that measures."""
    sys.orig_argv[1:] = ["-m", "tests.placement.test_generators", str(folder), data]
    write_down(folder, train(folder, Path(data), "flowtrain"))


def train_alone(folder: Path, *, data: str) -> None:
    """The same in one process."""
    write_down(folder, train(folder, Path(data), "auto"))


def train(folder: Path, data: Path, strategy: str) -> dict[str, Any]:
    """Trains a few steps; returns what was chosen, and the losses."""
    L.seed_everything(SEED, verbose=False)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy == "auto" else RANKS,
        strategy=strategy,
        max_steps=4,
        limit_val_batches=0,
        logger=CSVLogger(folder, "log", ""),
        callbacks=[losses, *([] if strategy == "auto" else [FlowMonitor(every_n_steps=1, peak_flops=1e12)])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Drawing(), drawings(data, index=flow.data.IndexConfig(cache_dir=folder)))
    allocation = getattr(trainer.strategy, "allocation", None)
    return {"losses": losses.found, "placement": None if allocation is None else allocation.placement}


class Losses(L.Callback):
    """Notes the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


@pytest.mark.timeout(600)
def test_a_run_needs_no_allocation(folder: Path, tmp_path: Path) -> None:
    arguments = {"data": str(folder)}
    jobs = [
        Job("run", f"{__name__}:train_without_allocation", RANKS, arguments),
        Job("alone", f"{__name__}:train_alone", 1, arguments),
    ]
    done = run_jobs(tmp_path, jobs)
    run, alone = done["run"].check(), done["alone"].check()
    notes = read_down(run.folder)
    assert notes[0]["losses"] == pytest.approx(read_down(alone.folder)[0]["losses"], rel=1e-5)
    assert len({note["placement"] for note in notes}) == 1
    assert "measuring the halves of Drawing" in run.log
    assert "planning failed" not in run.log
    with (run.folder / "log" / "metrics.csv").open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["mfu/all"]]
    assert all(float(row[f"mfu/{role}"]) > 0 for role in NAMES for row in rows[-1:])


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), "flowtrain")
