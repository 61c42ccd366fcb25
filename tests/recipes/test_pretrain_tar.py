"""The recipe for tar shards pretrains a small Qwen-VL from its YAML file, and goes on with the very next sample."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from flowtrain_lightning.cli import main
from tests.models.test_pretrained import published

pytest.importorskip("transformers")

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_tar" / "config.yaml"
FIT = ["--data.token_budget", "256", "--data.token_steps.microbatches", "2"]
FIT += ["--data.num_workers", "0", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
FIT += ["--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1", "--trainer.log_every_n_steps", "1"]


def shard(file: Path, first: int) -> None:
    """Captions and records, and one file that is no image."""
    with tarfile.open(file, "w") as tar:
        for number in range(first, first + 12):
            picture = io.BytesIO()
            Image.new("RGB", (56 + 8 * (number % 5), 60), (20 * (number % 12), 90, 30)).save(picture, "png")
            answer = {"role": "assistant", "content": "No. " * (number % 7 + 1)}
            says = [{"role": "user", "content": "<image>What?"}, answer]
            text = json.dumps({"messages": says}) if number % 2 else "The cat sat. " * (number % 5 + 1)
            pixels = b"no image" if number == first + 5 else picture.getvalue()
            for ending, body in (("png", pixels), ("json" if number % 2 else "txt", text.encode())):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))


def flowtrain(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["flowtrain", *map(str, arguments)])
    main()


def logged(run: Path) -> dict[int, float]:
    """Step -> loss."""
    (file,) = run.rglob("metrics.csv")
    head, *lines = (line.split(",") for line in file.read_text().splitlines())
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    return {int(row["step"]): float(row["train_loss"]) for row in rows if row.get("train_loss")}


def test_it_pretrains_and_goes_on_from_the_last_checkpoint_as_if_nothing_had_been(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    for number in range(2):
        shard(tmp_path / "shards" / f"train-{number}.tar", 100 * number)
    shard(tmp_path / "shards" / "val-0.tar", 900)
    published(tmp_path / "models" / "qwen", "qwen2_5_vl")
    config = tmp_path / "config.yaml"
    text = RECIPE.read_text(encoding="utf-8").replace("max_pixels: 501760", "max_pixels: 12544")
    config.write_text(text.replace("every_n_train_steps: 1000", "every_n_train_steps: 2"))
    fit = ["fit", "--config", config, *FIT, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir"]
    elsewhere = ["--trainer.callbacks.init_args.dirpath", tmp_path / "elsewhere"]
    flowtrain(monkeypatch, *fit, "whole", "--trainer.max_steps", "6", *elsewhere)
    flowtrain(monkeypatch, *fit, "first", "--trainer.max_steps", "4", "--ckpt_path", "last")
    flowtrain(monkeypatch, *fit, "second", "--trainer.max_steps", "6", "--ckpt_path", "last")
    whole, second = logged(tmp_path / "whole"), logged(tmp_path / "second")
    assert list(whole) == [0, 1, 2, 3, 4, 5]
    assert second == {step: whole[step] for step in (4, 5)}
