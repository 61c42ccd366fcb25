"""Tiles of a picture are media items to the packer, and in the lengths that planner and simulator read."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from flowtrain_lightning.allocator import ENCODER, ROLES, Allocation, Layout, named_model
from flowtrain_lightning.allocator.workload import role_loads
from flowtrain_lightning.cli import main
from flowtrain_lightning.cli.lengths import read_sizes
from flowtrain_lightning.cli.plan_input import read_workload
from flowtrain_lightning.models import InternVLM
from flowtrain_lightning.packing import SampleSizes, StepPlan
from flowtrain_lightning.placement.drawn_steps import steps_of
from tests.exactness.data import steps_data, write_steps
from tests.models.tiny import FAMILIES
from tests.placement.test_profile import PROFILE

TILE = 16
"""Patches."""
BUDGET = 4 * TILE
SETTINGS = {"token_budget": 512, "encoder_budget": BUDGET, "global_batch_size": 60}

ALONE = Allocation("colocated", dict.fromkeys(ROLES, Layout()), dict.fromkeys(ROLES, (0,)))

CONFIG = """
model: {class_path: tests.cli.test_tiles_in_plans.Tiled}
data:
  train: train.jsonl
  shuffle: false
  tokenizer: {class_path: tests.tiny.CharTokenizer}
  token_budget: 512
  encoder_budget: 64
  global_batch_size: 60
trainer: {accelerator: cpu, devices: 2, strategy: flowtrain, max_epochs: 1, logger: false}
"""


class Tiled(InternVLM):
    """A small model that takes tiles apart, and says which."""

    def __init__(self) -> None:
        super().__init__(FAMILIES["internvl"].config)
        self.processor = SimpleNamespace(images=FAMILIES["internvl"].images)


@pytest.fixture
def flowtrain(monkeypatch, tmp_path, capsys):
    """Runs a command in this process, where lengths are; answers with what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("flowtrain_lightning.cli.profile_command.profile_module", lambda *_, **__: PROFILE)
    write_steps(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    run("profile", "--config", "config.yaml", "--lengths", "lengths.parquet")
    return run


@pytest.fixture
def trained(tmp_path, flowtrain) -> StepPlan:
    """The step of all samples, as training packs it."""
    data = steps_data(tmp_path, images=FAMILIES["internvl"].images, **SETTINGS)
    data.read_as(Tiled())
    data.setup("fit")
    return data.train_dataloader().steps.plan(0, 0)


def patches_of_batches(plan: StepPlan) -> list[int]:
    return [int(plan.sizes.media_patches[media].sum()) for each in plan.batches[ENCODER] for media in each]


@pytest.mark.usefixtures("flowtrain")
def test_packer_planner_and_simulator_count_each_piece_of_a_picture(trained, tmp_path):
    pieces = trained.sizes.media_patches
    assert trained.sizes.media_pieces is not None
    assert pieces.max() == TILE, "a piece has an eighth of a batch at most, or is one tile"
    read = read_sizes(tmp_path / "lengths.parquet")
    np.testing.assert_array_equal(np.sort(read.media_patches), np.sort(pieces))
    workload = read_workload(tmp_path / "lengths.parquet", named_model("smolvlm-2.2b"), dict(SETTINGS))
    load = role_loads(named_model("smolvlm-2.2b"), workload)[ENCODER]
    assert load.items == pytest.approx(encoded(trained.sizes))
    assert load.tokens == pytest.approx(encoded(trained.sizes) * TILE)
    (simulated,) = steps_of(workload, read, count=1).packed(ALONE)
    for plan in (simulated, trained):
        assert max(patches_of_batches(plan)) <= BUDGET, "no picture is whole, of which some have more"
    assert sum(patches_of_batches(simulated)) == sum(patches_of_batches(trained))


def encoded(sizes: SampleSizes) -> int:
    """Media items of a step that are encoded, equal ones once."""
    return len(sizes.media_patches) if sizes.alike is None else len(np.unique(sizes.alike))


def test_a_plan_of_tiles_and_the_simulation_of_its_file_agree(flowtrain):
    common = ("--model", "smolvlm-2.2b", "--data", "lengths.parquet", "--global-batch-size", 60, "--json")
    planned = json.loads(flowtrain("plan", *common, "--devices", 4, "--out", "plan.yaml"))
    simulated = json.loads(flowtrain("simulate", *common, "--plan", "plan.yaml"))
    predicted = planned["plans"][planned["recommended"]]["step_seconds"]
    assert predicted == pytest.approx(simulated["step_seconds"], rel=0.05)
