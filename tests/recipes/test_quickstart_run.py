"""The quickstart as a whole: its configuration, its steps, its report."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from PIL import Image

from flowtrain_lightning import FlowModule, FlowTrainStrategy
from flowtrain_lightning.callbacks.timeline_recorder import read_timelines
from flowtrain_lightning.data import FlowDataModule
from recipes.quickstart import estimate
from recipes.quickstart.module import QuickstartVLM
from recipes.quickstart.pictures import Answer, draw_answers, draw_loss
from recipes.quickstart.report import configuration, one_of_each_kind, read_log
from recipes.quickstart.screen import Findings, PlacementTime, last_screen

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "quickstart" / "config.yaml"


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the configuration are relative to the repository's root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["flowtrain"])  # LightningCLI warns of pytest's own arguments


def configured(folder: Path, *options: str) -> LightningCLI:
    """What `flowtrain fit --config` builds, writing to another folder."""
    return LightningCLI(
        FlowModule,
        FlowDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=None,
        run=False,
        args=["--config", str(CONFIG), *elsewhere(folder), *options],
    )


def elsewhere(folder: Path) -> list[str]:
    return [
        f"--trainer.logger.init_args.save_dir={folder}",
        f"--trainer.default_root_dir={folder}",
        f"--trainer.callbacks.init_args.dirpath={folder / 'quickstart' / 'checkpoints'}",
        f"--data.index.cache_dir={folder / 'index'}",
    ]


def quickstart(folder: Path, *options: str, deadline: float) -> str:
    """Runs the quickstart from end to end, writing to another folder; all that it prints."""
    finished = subprocess.run(
        [sys.executable, "-m", "recipes.quickstart.run", *elsewhere(folder), *options],
        capture_output=True,
        text=True,
        timeout=deadline,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout + finished.stderr


def last_losses(folder: Path) -> tuple[float, float]:
    """The mean of the last ten training losses, and the last validation loss."""
    training, validation = read_log(folder / "quickstart" / "metrics.csv")
    return sum(loss for _, loss in training[-10:]) / len(training[-10:]), validation[-1][1]


def test_the_configuration_fits_the_classes_and_its_numbers_fit_one_another(tmp_path: Path) -> None:
    cli = configured(tmp_path)
    assert isinstance(cli.trainer.strategy, FlowTrainStrategy)
    assert isinstance(cli.model, QuickstartVLM)
    data = cli.datamodule
    assert cli.model.hparams["patch_dim"] == data.images.patch_dim
    assert cli.model.hparams["merge_size"] == data.images.merge_size
    assert cli.model.end_token == data.tokenizer.token_to_id(data.template.end)
    assert max(data.tokenizer.encode("".join(map(chr, range(32, 127))))) < cli.model.hparams["vocabulary"]


def test_every_sample_fits_a_microbatch_and_an_epoch_is_190_steps(tmp_path: Path) -> None:
    data = configured(tmp_path).datamodule
    data.setup("fit")
    assert len(data.train_dataloader()) == 190


@pytest.mark.full
def test_ten_steps_under_plain_lightning_lower_the_loss(tmp_path: Path) -> None:
    cli = configured(
        tmp_path,
        "--trainer.strategy=auto",
        "--trainer.devices=1",
        "--trainer.max_steps=10",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_progress_bar=false",
        "--trainer.callbacks=[]",
        "--data.init_args.global_batch_size=8",
        "--model.init_args.encoder_depth=1",
        "--model.init_args.backbone_depth=1",
        "--model.init_args.warmup_steps=1",
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.logger.save()
    training, _ = read_log(tmp_path / "quickstart" / "metrics.csv")
    assert len(training) == 10
    assert training[-1][1] < training[0][1] - 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_four_steps_on_an_encoder_rank_and_a_backbone_rank_end_on_the_last_screen(tmp_path: Path) -> None:
    roles = ("--trainer.strategy=flowtrain_lightning.FlowTrainStrategy", "--trainer.strategy.encoder_ranks=1")
    options = ("--trainer.max_steps=4", "--trainer.val_check_interval=4", "--trainer.limit_val_batches=1")
    printed = quickstart(tmp_path, *roles, *options, deadline=800)
    folder = tmp_path / "quickstart"
    training, validation = read_log(folder / "metrics.csv")
    assert [step for step, _ in training] == [0, 1, 2, 3]
    assert len(validation) == 1
    pools = [timeline["pool"] for timeline in read_timelines(folder / "timeline")]
    assert sum(pool["bytes"] for pool in pools) == sum(pool["leased_bytes"] for pool in pools) > 0
    loaded = QuickstartVLM.load_from_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert all(torch.isfinite(parameter).all() for parameter in loaded.parameters())
    assert re.search(r"^About \d+ min, ", printed, flags=re.MULTILINE)
    equal = re.search(r"first 4 losses, separate and colocated: equal to (\S+)", printed)
    assert equal is not None, printed
    assert float(equal.group(1)) < 1e-5
    assert all((folder / name).is_file() for name in ("step.png", "drawings.png", "loss.png"))
    assert [noise for noise in ("Warning", "is deprecated", "GPU available", "Tip:") if noise in printed] == []


@pytest.mark.full
def test_the_estimate_comes_from_steps_of_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    assert 0.001 < estimate.measured_step_seconds(configuration()) < 60


def test_the_last_screen_says_what_was_proved_and_where_the_pictures_are() -> None:
    shares = {"encoder": {"compute": 0.6, "stall": 0.4}, "backbone": {"compute": 0.9, "communication": 0.1}}
    found = Findings(
        weights=3_200_000,
        seconds=150.0,
        training=[(step, 4.0 - step / 10) for step in range(20)],
        validation=[(20, 2.5)],
        losses={"train": 2.0, "train_swapped": 3.0, "val": 2.5, "val_swapped": 3.0},
        moved=0.5,
        shown=[Answer(Path("a.png"), "flag, signal flag", "flag")],
        named=110,
        drawings=273,
        placements=[PlacementTime("colocated", shares), PlacementTime("separate", shares)],
        repeated=[(4.0, 4.0), (3.0, 3.0 + 3e-7)],
    )
    screen = last_screen(found, Path("runs/quickstart"))
    for said in ("3.2 million weights", "2.5 min", "2.000 → 3.000 (+50%)", "110 of 273", "equal to 1e-07"):
        assert said in screen
    for file in ("step.png", "drawings.png", "loss.png", "checkpoints/last.ckpt"):
        assert f"runs/quickstart/{file}" in screen
    assert max(map(len, screen.splitlines())) <= 110


def test_the_report_shows_the_first_drawing_of_each_frequent_kind() -> None:
    kinds = ["card", "flag, sign", "food", "flag", "food, fruit", "food"]
    answers = [Answer(Path(f"{place}.png"), kind, "flag") for place, kind in enumerate(kinds)]
    assert [answer.picture.stem for answer in one_of_each_kind(answers)] == ["2", "1", "0"]


def test_the_report_s_pictures_are_png_files(tmp_path: Path) -> None:
    drawing = tmp_path / "drawing.png"
    Image.new("RGB", (20, 10), "red").save(drawing)
    draw_loss([(step, 5.0 / (step + 1)) for step in range(40)], [(20, 2.0), (40, 1.5)], tmp_path / "loss.png")
    draw_answers([Answer(drawing, "flag, sign", "flag")] * 6, tmp_path / "drawings.png")
    for name in ("loss.png", "drawings.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.format == "PNG"
            assert picture.width > 500


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_images_matter_and_a_frozen_encoder_ends_higher(tmp_path: Path) -> None:
    longer = "--trainer.max_steps=800"  # by then what a frozen encoder lacks is more than chance
    printed = quickstart(tmp_path / "trained", longer, deadline=3000)
    print(printed)
    quickstart(tmp_path / "frozen", longer, "--model.init_args.freeze_encoder=true", deadline=3000)
    assert "is predicted to be" in (tmp_path / "trained" / "quickstart" / "allocation.yaml").read_text()
    trained, frozen = last_losses(tmp_path / "trained"), last_losses(tmp_path / "frozen")
    print(f"training and validation loss: {trained} trained, {frozen} with the encoder frozen")
    assert trained[0] < frozen[0]
    assert trained[1] < frozen[1]
    higher = re.search(r"with images of other drawings .*?\(\+(\d+)%\)", printed)
    assert higher is not None, printed
    assert int(higher.group(1)) >= 20
