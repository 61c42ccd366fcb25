"""The quickstart sends its metrics to Weights & Biases in groups; what an offline run holds is read back."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from flowtrain_lightning import FlowModule
from flowtrain_lightning.data import FlowDataModule

pytest.importorskip("wandb")

import wandb

from tests.lightning.wandb_file import read_config, read_history

pytestmark = pytest.mark.full  # that W&B gets the numbers is shown in `tests/lightning/test_loggers.py`

ROOT = Path(__file__).parents[2]
SMALL = [
    "--trainer.devices=1",
    "--trainer.max_steps=4",
    "--trainer.limit_val_batches=0",
    "--data.init_args.global_batch_size=8",
    "--model.init_args.encoder_depth=1",
    "--model.init_args.backbone_depth=1",
]


def options_of_the_page() -> list[str]:
    """Those of the command by which the recipe's page sends metrics to Weights & Biases."""
    page = (ROOT / "recipes" / "quickstart" / "README.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("flowtrain fit") and "WandbLogger" in line)
    return shlex.split(command)[2:]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an offline run of a few steps."""
    folder = tmp_path_factory.mktemp("wandb")
    elsewhere = [
        "--trainer.logger.offline=true",
        f"--trainer.logger.save_dir={folder}",
        f"--trainer.default_root_dir={folder}",
        f"--data.index.cache_dir={folder / 'index'}",
        "--trainer.callbacks.peak_flops=1e11",
        "--trainer.callbacks.every_n_steps=2",
    ]
    page = options_of_the_page()  # after the configuration it adds a callback behind the one that saves checkpoints
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # paths in the configuration are relative to it
        patch.setattr(sys, "argv", ["flowtrain"])
        cli = LightningCLI(
            FlowModule,
            FlowDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=None,
            run=False,
            args=[*page[:2], f"--trainer.callbacks.init_args.dirpath={folder / 'kept'}", *page[2:], *elsewhere, *SMALL],
        )
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        cli.trainer.logger.experiment.finish()
        wandb.teardown()  # waits for the process that writes the file
    return folder


def test_metrics_come_in_groups_which_are_sections_of_the_workspace(run: Path) -> None:
    names = set().union(*read_history(run))
    groups = {name.partition("/")[0] for name in names if "/" in name}
    assert groups >= {"throughput", "packing", "mfu", "time", "pool", "memory"}
    assert {"throughput/tokens_per_second", "packing/fill", "mfu/all", "train_loss"} <= names


def test_every_report_stands_at_its_step_with_numbers_that_can_be(run: Path) -> None:
    reports = [row for row in read_history(run) if "mfu/all" in row]
    assert [row["trainer/global_step"] for row in reports] == [1, 3]
    for row in reports:
        assert row["throughput/samples_per_second"] > 0
        assert 0 < row["mfu/all"] < 1
        assert 0 < row["packing/fill"] <= 1
        lane = [row[f"time/backbone 0 {kind}"] for kind in ("compute", "stall", "communication")]
        assert sum(lane) == pytest.approx(1)


def test_settings_and_allocation_are_kept_with_the_run(run: Path) -> None:
    config = read_config(run)
    assert config["allocation"].startswith("colocated")
    assert config["encoder_depth"] == 1
