"""Roles in stages, through Lightning's loops: what is logged, clipped and validated is that of whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowtrain_lightning.callbacks import AverageWeights, EvaluateAnswers
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.modules import Deep
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import tiny_data, write_records


def all_loops(folder: Path, *, data: str, layout: str, roles: dict[str, Any]) -> None:
    """Fits with validation by averages, validates, fits on with the same Trainer, and asks for predictions."""
    settings = {"max_epochs": 1, "precision": "64-true", "gradient_clip_val": 0.2, "default_root_dir": folder}
    settings["callbacks"] = [EvaluateAnswers(2), AverageWeights(0.5)]
    trainer = trainer_for(layout, strategy={"roles": roles}, **settings)
    module, records = Deep(lr=1e-3), tiny_data(Path(data), global_batch_size=6)
    trainer.fit(module, records)
    found = {"fit": {name: float(value) for name, value in trainer.callback_metrics.items()}}
    found["validate"] = dict(trainer.validate(module, records, verbose=False)[0])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, records)
    found["refit"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    batches = trainer.predict(module, records)  # which are packed by layout
    answers = sorted(tuple(answer) for batch in batches for answers in batch for answer in answers)
    write_down(folder, {**found, "labels": trainer.strategy.job.labels, "answers": answers})
    disconnect_groups()


def run(folder: Path, name: str, layout: str, **arguments: Any) -> list[dict[str, Any]]:
    job = Job(name, f"{__name__}:all_loops", ranks_of(layout), {"layout": layout, **arguments}, deadline=400)
    return read_down(run_jobs(folder, [job])[name].check().folder)


BACKBONE = "1+2", {"backbone": {"pipeline": 2}}, ["backbone 0, stage 0", "backbone 1, stage 1", "encoder 0"]
BOTH = (
    "colocated 2",
    {role: {"pipeline": 2} for role in ("encoder", "backbone")},
    [f"encoder {rank}, stage {rank} and backbone {rank}, stage {rank}" for rank in range(2)],
)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "roles", "labels"), [BACKBONE, BOTH], ids=["backbone", "both"])
def test_every_rank_sees_what_whole_roles_log_and_answer(tmp_path, layout, roles, labels):
    for name, count in (("train.jsonl", 24), ("val.jsonl", 8), ("predict.jsonl", 3)):
        write_records(tmp_path / "data", count, name)
    given = {"data": str(tmp_path / "data")}
    found = run(tmp_path, "in stages", layout, roles=roles, **given)
    expected = run(tmp_path, "whole", "1+1", roles={}, **given)[0]
    for rank in found:
        for loop in ("fit", "validate", "refit"):
            assert rank[loop] == pytest.approx(expected[loop], rel=1e-9)
        assert rank["labels"] == labels
    assert {"train_loss", "val_loss", "accuracy", "val_anls"} <= found[0]["fit"].keys()
    assert [rank["answers"] for rank in found] == [expected["answers"], *[[]] * (len(found) - 1)]
    assert len(expected["answers"]) == 3
