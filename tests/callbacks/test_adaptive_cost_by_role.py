"""Costs of several encoders and of a generator follow what each is measured to take, by the name of its role."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from torch import Tensor

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.callbacks import AdaptCosts
from flowtrain_lightning.data import PackedMedia, PackedTargets
from flowtrain_lightning.packing import CostModel, SampleSizes
from flowtrain_lightning.packing.role_graph import graph_of
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness import drawing, hearing
from tests.forks import Job, run_jobs

EPOCHS = 4
SLOW = 2e-3
"""Seconds that a role of each module takes for a patch or a frame, far more than it computes."""


class SlowEar(hearing.SeeingAndHearing):
    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        if media.modality == "audio":
            time.sleep(SLOW * len(media.pixels))
        return super().encode(media)


class SlowDrawer(drawing.Drawing):
    def generator_loss(self, items: PackedTargets, condition: Tensor) -> tuple[Tensor, int]:
        time.sleep(SLOW * sum(items.patches))
        return super().generator_loss(items, condition)


def train(folder: Path, *, hears: bool, data: str) -> None:
    """Trains on a rank for each role; writes the changes of costs, and what was encoded and drawn together."""
    allocation = (hearing if hears else drawing).allocation_of("1+1+1")
    module, plans = (SlowEar if hears else SlowDrawer)(), Plans()
    adapting = AdaptCosts()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=FlowTrainStrategy(allocation=allocation, hang_timeout=120),
        max_epochs=EPOCHS,
        limit_val_batches=0,
        callbacks=[adapting, plans],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, hearing.memory_data() if hears else drawing.drawings(Path(data)))
    told = {"changes": [change.state_dict() for change in adapting.changes], "plans": plans.found}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
    disconnect_groups()


class Plans(L.Callback):
    """Keeps the plan of every step."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        batches = {role: [[m.tolist() for m in own] for own in each] for role, each in batch.plan.batches.items()}
        self.found.append(batches)


@pytest.mark.full
@pytest.mark.parametrize(("hears", "slow"), [(True, "encoder_audio"), (False, "generator")])
def test_each_role_that_takes_media_gets_a_cost_of_its_own(tmp_path: Path, hears: bool, slow: str) -> None:
    drawing.write_drawings(tmp_path / "data")
    job = Job("run", f"{__name__}:train", 3, {"hears": hears, "data": str(tmp_path / "data")})
    folder = run_jobs(tmp_path, [job])["run"].check().folder
    first, *others = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3))
    assert all(other == first for other in others)
    last = first["changes"][-1]
    assert set(last["media_costs"]) == ({"encoder_image", "encoder_audio"} if hears else {"encoder", "generator"})
    cost = CostModel(**last["media_costs"][slow])
    lengths = np.array([4.0, 16.0, 64.0])
    assert all(cost.of_set(lengths[n : n + 1]) >= 0.3 * SLOW * lengths[n] for n in range(3))
    (file,) = folder.rglob("cost_changes.json")
    assert json.loads(file.read_text()) == first["changes"]


def test_a_role_is_dealt_by_its_own_cost() -> None:
    """A large media item and four of half its size for two ranks of either role."""
    patches, count = np.array([8, 4, 4, 4, 4] * 2), 10
    sizes = SampleSizes(
        tokens=np.full(count, 4),
        targets=np.full(count, 2),
        media_start=np.arange(count + 1),
        media_rows=np.full(count, 1),
        media_patches=patches,
        media_modality=np.array(["generated"] * 5 + ["image"] * 5),
    )
    graph = graph_of(("encoder", "backbone", "generator"))
    members = StepMembers({"encoder": 2, "backbone": 1, "generator": 2}, graph=graph)

    def beside_the_large(**costs: Any) -> dict[str, int]:
        """Role -> how many media items the rank has that has the large one."""
        batches = plan_step(sizes, np.arange(count), members, token_budget=64, **costs).batches
        of_ranks = {role: [np.concatenate(own) for own in batches[role]] for role in ("encoder", "generator")}
        return {role: next(len(own) for own in each if {0, 5} & {*own.tolist()}) for role, each in of_ranks.items()}

    steep = CostModel(0.0, 1.0, 0.0)
    assert beside_the_large() == {"encoder": 2, "generator": 2}
    assert beside_the_large(media_costs={"generator": steep}) == {"encoder": 2, "generator": 1}
    assert beside_the_large(media_costs={"encoder": steep}) == {"encoder": 1, "generator": 2}
