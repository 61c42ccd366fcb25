"""Buffers that forwards write: those of a role's first rank are the role's, on every layout, and in a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from flowtrain_lightning.checkpoint import read_checkpoint
from tests.checkpoint.written_buffers import STEPS
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs

FSDP, ZERO = {"shard": "fsdp"}, {"shard": "deepspeed-2"}
CASES = [
    ("2+1", {}, False),
    pytest.param("2+2", {}, False, marks=pytest.mark.full),
    pytest.param("colocated 2", {"encoder": FSDP, "backbone": FSDP}, False, marks=pytest.mark.full),
    pytest.param("2+2", {"encoder": ZERO, "backbone": {"shard": "deepspeed-3"}}, False, marks=pytest.mark.full),
    pytest.param("mixed 1+2", {}, False, marks=pytest.mark.full),
    pytest.param("2+2", {"encoder": {"tensor": 2}, "backbone": {"context": 2}}, False, marks=pytest.mark.full),
    pytest.param("2+1", {}, True, marks=pytest.mark.full),
    pytest.param("2+1", {"encoder": FSDP}, True, marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found, and the folder."""
    folder = tmp_path_factory.mktemp("buffers")
    write_steps(folder / "data")

    def train(name: str, layout: str, roles: dict[str, Any], **more: Any) -> Any:
        imports = "deepspeed" if "deepspeed" in str(roles) else None
        arguments = {"data": str(folder / "data"), "layout": layout, "roles": roles, **more}
        job = Job(name, "tests.checkpoint.written_buffers:train", ranks_of(layout), arguments, imports=imports)
        done = run_jobs(folder, [job])[name].check()
        return read_down(done.folder), done.folder

    return train


def of_half(found: dict[str, Any], half: str) -> dict[str, Any]:
    """The buffers of a half that a checkpoint holds, if they are on a rank."""
    return {name: value for name, value in found.items() if name.startswith(half) and "cache" not in name}


@pytest.mark.parametrize(("layout", "roles", "freeze"), CASES)
def test_a_checkpoint_holds_the_first_rank_s_buffers_and_a_run_goes_on_with_them(train, layout, roles, freeze):
    name = f"{layout} {freeze} {roles}".translate({ord(sign): " " for sign in ":{}',"})
    ranks, folder = train(name, layout, roles, freeze=freeze)
    state = read_checkpoint(folder / "saved.ckpt")["state_dict"]
    stored = {name: value.tolist() for name, value in state.items() if "statistics" in name or name == "merged"}
    for half in ("encoder", "backbone"):
        held = [found for rank in ranks if (found := of_half(rank["saved"], half))]
        if layout in ("2+1", "2+2") and not roles and len(held) > 1:
            assert held[0] != held[1], "ranks have seen other samples"
        assert of_half(stored, half) == held[0]
    assert stored["merged"] == ranks[0]["saved"]["merged"]
    resumed, _ = train(f"{name} resumed", layout, roles, freeze=freeze, resumed=str(folder / "saved.ckpt"))
    for rank, before in zip(resumed, ranks, strict=True):
        for half in ("encoder", "backbone"):
            began = of_half(rank["began with"], half)
            assert not began or began == of_half(stored, half)
        assert rank["losses"][str(STEPS)] == before["losses"][str(STEPS)]
        assert of_half(rank["validated"], "backbone.statistics") == of_half(before["validated"], "backbone.statistics")
    validated = [found for rank in ranks if (found := of_half(rank["validated"], "backbone"))]
    assert all(found == validated[0] for found in validated)


@pytest.mark.full
def test_a_buffer_that_changes_its_shape_is_refused_where_ranks_would_differ(train):
    ranks, _ = train("growing", "colocated 2", {}, kind="growing")
    assert all("'backbone.statistics.average' was [] torch.float64 when training began" in r["said"] for r in ranks)
