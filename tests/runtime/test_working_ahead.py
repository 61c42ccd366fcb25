"""A frozen encoder works ahead of the backbone, step after step, until the pool or its bound is full."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from flowtrain_lightning.compute.feature_spec import FeatureSpec
from flowtrain_lightning.data import StepPlan
from flowtrain_lightning.packing.step_work import STEPS_AHEAD
from flowtrain_lightning.runtime.program import PADDING
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, STALL, Span
from flowtrain_lightning.runtime.working_ahead import AheadTogether
from flowtrain_lightning.trainer.preemption import LIGHTNINGS_BROADCAST
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs
from tests.packing.sizes import shard_of
from tests.pool.faults import slowness
from tests.runtime.interleaving import Interleaving, least_bytes
from tests.tiny import tiny_data, write_records

STEPS = 12
SPEC = FeatureSpec(((16,),), (torch.float64,))
"""What the module's encoder returns for a row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    write_records(folder / "data", 8 * STEPS, pictures_of=[1, 1, 0, 2] * (2 * STEPS))
    write_records(folder / "data", 24, "val.jsonl", seed=3)
    return folder


@pytest.fixture(scope="module")
def plans(folder: Path) -> list[StepPlan]:
    """The steps with one encoder and one backbone rank."""
    data = tiny_data(folder / "data", shuffle=False)
    data.setup("fit")
    steps = replace(data.train_dataloader().steps, shard=shard_of(encoder=0, backbone=0))
    return [steps.plan(0, step) for step in range(STEPS)]


@pytest.fixture(scope="module")
def tight_pool(plans: list[StepPlan]) -> int:
    """Room for three of the largest batches ahead."""
    return 2 * 3 * max(least_bytes(plan, SPEC) for plan in plans)


def train(folder: Path, layout: str, **settings: Any) -> list[dict[str, Any]]:
    arguments = {"data": str(folder / "data"), "layout": layout, **settings}
    name = f"{layout} {settings}".replace("/", " ")
    done = run_jobs(folder, [Job(name, "tests.runtime.frozen_encoder:train", ranks_of(layout), arguments)])
    return read_down(done[name].check().folder)


def spans_of(rank: dict[str, Any], lane: str, kind: str, stage: str = "train") -> list[Span]:
    spans = [Span(*span) for span in rank["spans"]]
    return [span for span in spans if (span.lane, span.kind, span.stage) == (lane, kind, stage)]


def ends_of_steps(rank: dict[str, Any], stage: str = "train") -> dict[int, float]:
    """When the backbone finished the last microbatch of each step."""
    return {span.step: span.end for span in spans_of(rank, "backbone", COMPUTE, stage)}


@pytest.fixture(scope="module")
def roomy(folder: Path) -> list[dict[str, Any]]:
    """A run with more room than it needs."""
    return train(folder, "1+1", max_epochs=1, limit_val_batches=0)


@pytest.fixture(scope="module")
def tight(folder: Path, tight_pool: int) -> list[dict[str, Any]]:
    """A run with room for a few batches."""
    return train(folder, "1+1", max_epochs=1, limit_val_batches=0, pool_bytes=tight_pool)


def test_the_encoder_begins_later_steps_before_the_backbone_has_done_this_one(roomy):
    backbone, encoder = roomy
    ends = ends_of_steps(backbone)
    begins: dict[int, float] = {}
    for span in spans_of(encoder, "encoder", COMPUTE):
        begins[span.step] = min(span.start, begins.get(span.step, span.start))
    assert len(begins) == len(ends) == STEPS
    assert all(begins[step] < ends[step - 1] for step in range(1, STEPS))
    # The backbone sleeps in every microbatch, so the encoder gets several steps ahead.
    assert any(begins[step] < ends[step - 3] for step in range(3, STEPS))


def test_so_it_does_on_a_stream_of_which_a_step_is_delivered_ahead(folder, roomy):
    backbone, encoder = train(folder, "1+1", max_epochs=1, limit_val_batches=0, streams=True)
    assert backbone["train"] == encoder["train"] == pytest.approx(roomy[0]["train"], rel=1e-9)
    ends = ends_of_steps(backbone)
    assert any(span.start < ends[span.step - 3] for span in spans_of(encoder, "encoder", COMPUTE) if span.step > 2)


def test_the_encoder_never_waits_while_there_is_room_and_work(roomy, plans):
    encoder = roomy[1]
    forwards = spans_of(encoder, "encoder", COMPUTE)
    for stall in spans_of(encoder, "encoder", STALL):
        allowed = [step for step in range(STEPS) if step <= stall.step + STEPS_AHEAD]
        todo = {(step, number) for step in allowed for number in range(len(plans[step].batches["encoder"][0]))}
        done = {(span.step, span.number) for span in forwards if span.end <= stall.start}
        missed = todo - done
        assert not missed or stall.end - stall.start < 0.02 * slowness(), f"waited with {sorted(missed)[:3]} to do"


def test_the_encoder_stops_at_its_bound_of_steps(roomy):
    backbone, encoder = roomy
    ends = ends_of_steps(backbone)
    for span in spans_of(encoder, "encoder", COMPUTE):
        if span.step > STEPS_AHEAD:
            assert span.start > ends[span.step - STEPS_AHEAD - 1]


def test_with_a_full_pool_the_encoder_waits_and_goes_on_as_room_is_given_back(tight, plans, tight_pool):
    encoder = tight[1]
    forwards = spans_of(encoder, "encoder", COMPUTE)
    assert {(span.step, span.number) for span in forwards} == {
        (step, number) for step, plan in enumerate(plans) for number in range(len(plan.batches["encoder"][0]))
    }
    waited = [stall for stall in spans_of(encoder, "encoder", STALL) if stall.end - stall.start > 0.02]
    assert waited
    largest = max(least_bytes(plan, SPEC) for plan in plans)
    for stall in waited:
        done = [span for span in forwards if span.end <= stall.start]
        if len(done) < len(forwards):
            ahead = sum(nbytes(plans, span) for span in done if span.step > stall.step)
            assert ahead + 2 * largest > tight_pool // 2  # room that is free may lie in two pieces


def nbytes(plans: list[StepPlan], forward: Span) -> int:
    entries = [entry.rows for entry in plans[forward.step].entries if entry.maker.number == forward.number]
    return sum(SPEC.entry_nbytes(entries))


def test_nothing_is_sent_back_to_a_frozen_encoder(roomy):
    spans = [span for rank in roomy for lane in ("encoder", "backbone") for span in spans_of(rank, lane, COMMUNICATION)]
    sent = {span.name for span in spans}
    assert "features" in sent
    assert "gradients" not in sent


@pytest.mark.parametrize("layout", ["1+2", "mixed 1+1"])
def test_ranks_do_not_meet_between_steps(folder, layout):
    """Lightning's broadcast of signals would make them wait for one that works ahead; see `PreemptionCheckpoint`."""
    assert callable(getattr(_TrainingEpochLoop, LIGHTNINGS_BROADCAST))
    ranks = train(folder, layout, max_steps=3, limit_val_batches=0)
    assert [rank["broadcasts"] for rank in ranks] == [0] * ranks_of(layout)


def check_equal(folder: Path, layout: str, **settings: Any) -> list[dict[str, Any]]:
    of_flowtrain = {name: settings.pop(name) for name in ("pool_bytes", "roles") if name in settings}
    if "deepspeed" in str(of_flowtrain):
        settings["precision"] = "32-true"
    (alone,) = train(folder, "auto", **settings)
    ranks = train(folder, layout, **of_flowtrain, **settings)
    bound = 1e-5 if "precision" in settings else 1e-12
    for rank in ranks:
        assert rank["train"] == pytest.approx(alone["train"], rel=bound)
        assert rank["val"] == pytest.approx(alone["val"], rel=bound)
    return ranks


FSDP = {"shard": "fsdp"}
SHARDED = {"encoder": FSDP}


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("2+1", SHARDED),
        pytest.param("1+1", {}, marks=pytest.mark.full),
        pytest.param("2+2", {}, marks=pytest.mark.full),
        pytest.param("4+2", {"encoder": {"shard": "fsdp", "replicas": 2}, "backbone": FSDP}, marks=pytest.mark.full),
        pytest.param("2+1", {"encoder": {"shard": "deepspeed-2"}}, marks=pytest.mark.full),
        pytest.param("2+1", {"encoder": {"shard": "deepspeed-3"}}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_validation_in_mid_epoch_works_with_training_features_waiting_in_a_full_pool(folder, layout, roles, tight_pool):
    interval = 3
    ranks = check_equal(folder, layout, max_epochs=1, val_check_interval=interval, pool_bytes=tight_pool, roles=roles)
    ends = ends_of_steps(ranks[0])
    begun = {
        last: max(span.step for span in spans_of(ranks[-1], "encoder", COMPUTE) if span.start < ends[last])
        for last in range(interval - 1, STEPS - 1, interval)  # the steps that a validation follows
    }
    assert any(step > last for last, step in begun.items())
    padded = any(span.number == PADDING for rank in ranks for span in spans_of(rank, "encoder", COMPUTE))
    assert padded == (roles.get("encoder", {}).get("shard") in ("fsdp", "deepspeed-3"))


@pytest.mark.parametrize("layout", ["1+1", pytest.param("2+2", marks=pytest.mark.full)])
def test_features_of_skipped_steps_or_of_changed_weights_are_not_taken_for_others(folder, layout):
    ranks = check_equal(folder, layout, max_epochs=2, limit_val_batches=0, skips_from=[0, 4], changes_at=[1, 0])
    assert len(ranks[0]["train"]) == 4 + STEPS


@settings(max_examples=40)
@given(st.integers(2, 4), st.integers(0, 5), st.integers(0, 12), st.integers(0, 1 << 30))
def test_ranks_that_need_each_other_agree_on_work_ahead_in_every_order_of_events(ranks, batches, grants, seed):
    interleaving, chance = Interleaving(ranks + 1, seed), random.Random(seed)
    encoded: list[list[int]] = [[] for _ in range(ranks)]
    room, is_over, sums = [0] * ranks, [False] * ranks, [defaultdict(int) for _ in range(2)]

    def encode_ahead(rank: int) -> None:
        rounds = count()

        def find() -> Any:
            return ("a step", len(encoded[rank])) if len(encoded[rank]) < batches else None

        def encode(_: Any, number: int) -> None:
            interleaving.gather(rank, range(ranks), f"forward {number}")
            encoded[rank].append(number)
            room[rank] -= 1

        def sum_votes(votes: torch.Tensor) -> torch.Tensor:
            number = next(rounds)
            for total, vote in zip(sums, votes.tolist(), strict=True):
                total[number] += vote
            interleaving.gather(rank, range(ranks), "vote")
            return torch.tensor([total[number] for total in sums])

        work_ahead = AheadTogether(find, lambda *_: room[rank] > 0, encode, sum_votes)
        while (again := work_ahead(is_over[rank])) or not is_over[rank]:
            interleaving.poll(rank, sleeps=not again)

    def grant() -> None:
        for rank in chance.choices(range(ranks), k=grants):
            interleaving.inbox[rank].append(partial(room.__setitem__, rank, room[rank] + 1))
            interleaving.poll(ranks, sleeps=False)
        for rank in range(ranks):
            interleaving.inbox[rank].append(partial(is_over.__setitem__, rank, True))

    interleaving.run([*(partial(encode_ahead, rank) for rank in range(ranks)), grant])
    assert all(numbers == encoded[0] for numbers in encoded)


def test_a_rank_that_is_killed_in_work_ahead_ends_those_that_wait_for_it(folder):
    """They wait in the gathering of weights, or for its word on the next batch."""
    settings = {"data": str(folder / "data"), "layout": "2+1", "roles": SHARDED, "max_epochs": 1, "killed_at": [2, 7]}
    done = run_jobs(folder, [Job("killed", "tests.runtime.frozen_encoder:train", 3, settings)])["killed"]
    assert done.codes == [1, 1, -9]
    for rank in (0, 1):
        assert "Rank 2 (encoder 1) died" in (done.folder / f"rank{rank}.log").read_text()


@pytest.mark.parametrize(
    ("layout", "roles"), [("1+1", {}), pytest.param("2+1", SHARDED, marks=pytest.mark.full)], ids=str
)
def test_weights_changed_in_mid_epoch_end_the_run_before_old_features_count(folder, layout, roles):
    data = str(folder / "data")
    arguments = {"data": data, "layout": layout, "roles": roles, "max_epochs": 1, "changes_at": [0, 4]}
    job = Job("changed weights", "tests.runtime.frozen_encoder:train", ranks_of(layout), arguments)
    done = run_jobs(folder, [job])["changed weights"]
    assert done.codes == [1] * ranks_of(layout)
    for text in [path.read_text() for path in sorted(done.folder.glob("rank*.log"))]:
        assert "were changed between two steps: 'encoder.embed.weight' and 15 more. It is frozen, so features" in text
        assert "`on_train_epoch_start`, or set FlowTrainStrategy(placement='colocated')" in text


def test_so_do_buffers_that_a_hook_writes(folder):
    arguments = {"data": str(folder / "data"), "layout": "1+1", "max_epochs": 1, "writes_at": [0, 4]}
    done = run_jobs(folder, [Job("written buffers", "tests.runtime.frozen_encoder:train", 2, arguments)])
    assert done["written buffers"].codes == [1, 1]
    assert "Buffers of the encoder were changed between two steps: 'encoder.level'." in done["written buffers"].log
