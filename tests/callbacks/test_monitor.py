"""The monitor logs the figures of every lane and of every rank's part of the pool, whatever the layout."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from flowtrain_lightning.callbacks import FlowMonitor
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.modules import KINDS as KINDS_OF_MODULES
from tests.forks import Job, run_jobs
from tests.tiny import tiny_data, write_records


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    freeze_encoder: bool = False,
    every_n_steps: int = 2,
    kind: str = "tiny",
    strategy: dict[str, Any] | None = None,
    peak_flops: float | None = 1e12,
) -> None:
    """Trains an epoch under the monitor; rank 0's logger writes ``log/metrics.csv``."""
    trainer = trainer_for(
        layout,
        strategy=strategy,
        max_epochs=1,
        limit_val_batches=0,
        log_every_n_steps=every_n_steps,
        logger=CSVLogger(folder, "log", ""),
        callbacks=[FlowMonitor(every_n_steps, peak_flops)],
        default_root_dir=folder,
    )
    trainer.fit(KINDS_OF_MODULES[kind](freeze_encoder=freeze_encoder), datamodule=tiny_data(Path(data)))
    disconnect_groups()


KINDS = ("compute", "stall", "communication")
POOL = ("put", "read", "waiting", "refused", "peak", "fallbacks")
OF_ALL = {
    *(f"throughput/{what}_per_second" for what in ("samples", "tokens", "media_items")),
    *(f"packing/{what}" for what in ("fill", "padding", "backbone_imbalance", "encoder_imbalance")),
    *(f"mfu/{what}" for what in ("all", "encoder", "backbone")),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 40)
    return folder


def logged(folder: Path, data: Path, layout: str, **arguments: object) -> list[dict[str, float]]:
    """The monitor's figures, in the order in which they were logged, each time with the loss of the same step."""
    job = Job(
        "train",
        f"{__name__}:train",
        ranks_of(layout),
        {"data": str(data), "layout": layout, **arguments},
    )
    log = run_jobs(folder, [job])["train"].check().folder / "log/metrics.csv"
    with log.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    told = [row for row in rows if any("/" in name for name in row)]
    assert {row["step"] for row in told} == {row["step"] for row in rows if "train_loss" in row}
    return [{name: row[name] for name in row if "/" in name} for row in told]


@pytest.mark.parametrize(
    ("layout", "lanes", "ranks"),
    [
        ("1+1", {"backbone 0", "encoder 0"}, {"backbone 0", "encoder 0"}),
        pytest.param(
            "1+2",
            {"backbone 0", "backbone 1", "encoder 0"},
            {"backbone 0", "backbone 1", "encoder 0"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "colocated 2",
            {"backbone 0", "backbone 1", "encoder 0", "encoder 1"},
            {"encoder 0 and backbone 0", "encoder 1 and backbone 1"},
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_lane_and_every_rank_is_logged(tmp_path, data, layout, lanes, ranks):
    told = logged(tmp_path, data, layout)
    everything = {name for figures in told for name in figures}
    assert everything == {f"time/{lane} {kind}" for lane in lanes for kind in KINDS} | OF_ALL | {
        name
        for rank in ranks
        for name in (f"memory/{rank}", f"data/{rank} waiting", *(f"pool/{rank} {name}" for name in POOL))
    }
    last = {name: figure for figures in told for name, figure in figures.items()}
    for lane in lanes:
        assert sum(last[f"time/{lane} {kind}"] for kind in KINDS) == pytest.approx(1)
    for rank in ranks:
        assert last[f"pool/{rank} put"] > 0
        assert 0 < last[f"pool/{rank} peak"] <= 1
        assert 0 <= last[f"pool/{rank} waiting"] <= 1
        assert 0 <= last[f"data/{rank} waiting"] <= 1
    assert 0 < last["packing/fill"] <= 1
    of_roles = last["mfu/encoder"] + last["mfu/backbone"]
    assert 0 < last["mfu/all"] <= of_roles * (1 + 1e-6) < 1, "float32 rounds each"


@pytest.mark.full
@pytest.mark.parametrize("shard", ["replicate", "fsdp"])
def test_the_rank_whose_experts_get_most_rows_is_logged(tmp_path, data, shard):
    strategy = {"roles": {"backbone": {"expert": 2, "shard": shard}}}
    last, *_ = reversed(logged(tmp_path, data, "1+2", kind="crowded", strategy=strategy, peak_flops=None))
    assert last["experts/backbone 0 rows"] > 0 == last["experts/backbone 1 rows"]
    assert last["experts/backbone 0 fullest"] == 1, "all tokens pass both of its experts"
    assert last["experts/backbone fullest rank"] == 2
    assert last["experts/backbone 0 dropped"] == last["experts/backbone 1 dropped"] == 0


@pytest.mark.full
@pytest.mark.parametrize("roles", [{}, {"backbone": {"expert": 2, "recompute": "full"}}], ids=["whole", "divided"])
def test_how_full_each_expert_is_is_logged_in_any_layout(tmp_path, data, roles):
    last, *_ = reversed(logged(tmp_path, data, "1+2", kind="crowded", strategy={"roles": roles}, peak_flops=None))
    assert [last[f"experts/backbone expert {n}"] for n in range(4)] == [2, 2, 0, 0], "all tokens pass the first two"
    assert not any(" 0 expert" in name for name in last)


@pytest.mark.full
def test_an_encoder_that_works_ahead_is_not_made_to_wait(tmp_path, data):
    told = logged(tmp_path, data, "1+1", freeze_encoder=True, every_n_steps=1)
    assert any("time/encoder 0 compute" in figures for figures in told)


def test_fewer_steps_than_one_are_refused():
    with pytest.raises(ValueError, match="every_n_steps is 0; it must be at least 1"):
        FlowMonitor(0)
