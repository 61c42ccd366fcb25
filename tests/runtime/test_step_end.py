"""Notes of encoder ranks reach the first backbone rank with a step's report, for as long as it is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowtrain_lightning.allocator import Layout, default_allocation
from flowtrain_lightning.compute.step_metrics import MetricAccumulator, StepReport
from flowtrain_lightning.data import RankShard, StepBatch
from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.pool import Key, Mesh, Pool
from flowtrain_lightning.runtime.program_of_plan import make_program
from flowtrain_lightning.runtime.step import RankContext, Step
from flowtrain_lightning.runtime.step_end import StepEnd
from flowtrain_lightning.runtime.timeline import Timeline
from tests.packing.sizes import make_sizes, plan_of, shard_of
from tests.pool.ranks import meshes, open_pools, wait_for

BACKBONE, ENCODER = 0, 1
NOTES = 3
"""The channel of notes of training steps."""

ALLOCATION = default_allocation(2, "separate", 1)


class Rank:
    """One of two ranks, at the end of each step."""

    def __init__(self, mesh: Mesh, pool: Pool) -> None:
        alone = CrossGroup(dist.HashStore(), mesh.rank, 1, timedelta(seconds=5))
        groups = Groups(alone, alone, alone, 0, 1, None, JobKey(b"both ranks"), iter(()))  # type: ignore[arg-type]
        job: Any = SimpleNamespace(rank=mesh.rank, roles=("encoder",), allocation=ALLOCATION, mesh=mesh, groups=groups)
        self.metrics = MetricAccumulator()
        self.pool, self.mesh = pool, mesh
        self._end = StepEnd(job, [ENCODER], {"train": self.metrics})
        self._context = RankContext(pool, None, mesh.page, Timeline(), {})  # type: ignore[arg-type]

    def agree(self, index: int, note: dict[str, Any] | None) -> StepReport:
        self.metrics.close_microbatch(torch.tensor(6.0), 3)
        return self._end.agree(self._context, step(index, shard_of(backbone=0)), note)

    def receive(self, index: int, note: dict[str, Any] | None, meanwhile: Callable[[bool], bool]) -> StepReport:
        return self._end.receive(self._context, step(index, shard_of(encoder=0)), note, meanwhile)


def step(index: int, shard: RankShard) -> Step:
    plan = plan_of(make_sizes((10, [4])), 1, 1)
    return Step(StepBatch(plan, shard, (), {}, 0, index), make_program(plan, shard, 4), "train", index, ["encoder"])


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_a_report_and_the_notes_of_all_ranks_reach_all(transport: str):
    with meshes(2, transport) as (backbone, encoder):
        pools = open_pools([backbone, encoder], 1 << 16, 1 << 16, transport)
        first, second = Rank(backbone, pools[BACKBONE]), Rank(encoder, pools[ENCODER])
        reports: list[StepReport] = []

        def agree_once(is_over: bool) -> bool:
            if not reports:
                wait_for(first.pool, lambda: first.pool.arrived([Key(NOTES, 0, 0)]))
                reports.append(first.agree(0, {"from": "backbone"}))
            return False

        assert second.receive(0, {"from": "encoder"}, agree_once) == reports[0]
        assert (reports[0].loss, reports[0].tokens) == (2.0, 3.0)
        assert reports[0].notes == ({"from": "backbone"}, {"from": "encoder"})


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (StepRecord("layers", [1, 3]), ""),
        (StepRecord("other layers"), "run different layers of the backbone in step 7.*override `parallelize_backbone`"),
    ],
)
def test_ranks_that_share_weights_compare_what_they_have_used(other: StepRecord, told: str):
    def gather(role: str, value: Any) -> list[Any]:
        return [value, [value[0], other.layers, other.unused]]

    layout = Layout(2, shard="fsdp")
    allocation = SimpleNamespace(
        layouts={"backbone": layout},
        rank_within=lambda *_: 0,
        producers=(),
        trunk="backbone",
        ranks={"backbone": (0, 1)},
    )
    groups = SimpleNamespace(gather_over_role=gather, sum_over_role=gather)
    job: Any = SimpleNamespace(rank=0, allocation=allocation, mesh=None, groups=groups)
    own = StepRecord("layers", {1, 2})
    with pytest.raises(RuntimeError, match=told) if told else nullcontext():
        assert StepEnd(job, [], {}).compare(step(7, shard_of(backbone=0)), "backbone", own) == {1}


def give_up(is_over: bool) -> bool:
    raise InterruptedError("the test has seen enough")


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_nothing_is_sent_to_a_rank_whose_run_is_over(transport: str):
    with meshes(2, transport) as (backbone, encoder):
        pools = open_pools([backbone, encoder], 1 << 16, 1 << 16, transport)
        sender = Rank(encoder, pools[ENCODER])
        with pytest.raises(InterruptedError):
            sender.receive(0, {"told": "in time"}, give_up)
        backbone.close()
        wait_for(pools[ENCODER], lambda: encoder.has_left(BACKBONE))
        put = pools[ENCODER].counters.entries
        with pytest.raises(InterruptedError):
            sender.receive(1, {"told": "too late"}, give_up)
        assert pools[ENCODER].counters.entries == put == 1
