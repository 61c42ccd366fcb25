"""A half that is sharded is never whole on a rank, and begins with the weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs
from tests.parallel.building import SHARDED


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("building")
    write_steps(folder)
    return str(folder)


def ran(folder: Path, function: str, layout: str, **arguments: Any) -> list[dict[str, Any]]:
    arguments = {"layout": layout, **arguments}
    job = Job(function, f"tests.parallel.building:{function}", ranks_of(layout), arguments)
    return read_down(run_jobs(folder, [job])[function].check().folder)


LONGER = [pytest.param(kind, marks=pytest.mark.full) for kind in ("pairs", "early")]


@pytest.mark.parametrize("kind", ["deep", *LONGER])
def test_shards_hold_the_weights_that_one_process_builds(tmp_path, data, kind):
    for found in ran(tmp_path, "initial_weights", "colocated 2", data=data, kind=kind, roles=SHARDED):
        assert found["differ"] == []
        assert found["compared"] > 20
        gathered = [name for name in found["alone"] if name.startswith("backbone")]
        if kind == "pairs":
            assert gathered == ["backbone.more.0", "backbone.more.1"]
        else:
            assert gathered == ["backbone.block", "backbone.more.0", "backbone.more.1", "backbone.more.2"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("1+2", {"backbone": {"shard": "fsdp"}}),
        ("2+2", SHARDED),
        ("1+4", {"backbone": {"shard": "fsdp", "replicas": 2}}),
        ("colocated 2", {"backbone": {"shard": "fsdp"}}),
    ],
)
def test_every_layout_begins_with_the_weights_of_one_process(tmp_path, data, layout, roles):
    for found in ran(tmp_path, "initial_weights", layout, data=data, kind="deep", roles=roles):
        assert found["differ"] == []


def test_building_takes_the_memory_of_a_shard_and_one_block(tmp_path):
    block, blocks, ranks = 16 << 20, 12, 3
    shard = blocks * block / ranks
    job = Job(
        "memory", "tests.parallel.building:memory_of_building", 1, {"ranks": ranks, "blocks": blocks}, deadline=240
    )
    (found,) = read_down(run_jobs(tmp_path, [job])["memory"].check().folder)
    assert 0.9 * shard < found["grown"] <= 1.3 * shard + block
