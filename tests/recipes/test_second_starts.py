"""Each recipe, typed twice with `--ckpt_path last` on two processes, goes on where its first start has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain_lightning.checkpoint.index_file import read_index
from tests.forks import Job, run_jobs
from tests.models.test_pretrained import published, records
from tests.recipes import test_llava, test_pretrain_tar
from tests.recipes.test_quickstart_run import ROOT, elsewhere

pytestmark = pytest.mark.full

SECONDS = 900  # the longest wait on a busy machine

__all__ = ["records"]  # a fixture


def llava(folder: Path, records: Path) -> list[str]:
    """The second stage: the language model in two shards, colocated with the frozen tower."""
    model = published(folder / "model", "llava")
    text = (ROOT / "recipes" / "llava" / "all.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(text.replace("model: models/llava-projected  #", f"model: {model}  #"))
    data = [f"--data.{stage}={records}" for stage in ("train", "val")]
    return [*data, *test_llava.FIT]


def pretrain_tar(folder: Path, records: Path) -> list[str]:
    """Streamed shards, and steps by tokens."""
    shards = folder / "shards"
    shards.mkdir()
    for name, first in (("train-0", 0), ("train-1", 100), ("val-0", 900)):
        test_pretrain_tar.shard(shards / f"{name}.tar", first)
    model = published(folder / "model", "qwen2_5_vl")
    text = test_pretrain_tar.RECIPE.read_text(encoding="utf-8").replace("max_pixels: 501760", "max_pixels: 12544")
    text = text.replace("models/qwen", str(model)).replace("every_n_train_steps: 1000", "every_n_train_steps: 1")
    (folder / "config.yaml").write_text(text)
    data = [f"--data.{stage}={shards}/{stage}-*.tar" for stage in ("train", "val")]
    return [*data, *test_pretrain_tar.FIT]


def quickstart(folder: Path, records: Path) -> list[str]:
    """The quickstart's own model and data; validated, and so saved, after each step."""
    (folder / "config.yaml").write_text((ROOT / "recipes" / "quickstart" / "config.yaml").read_text(encoding="utf-8"))
    return [*elsewhere(folder), "--trainer.val_check_interval=1", "--trainer.limit_val_batches=1"]


@pytest.mark.parametrize("recipe", [quickstart, llava, pretrain_tar])
def test_the_same_command_started_again_goes_on(tmp_path, records, monkeypatch, recipe):
    monkeypatch.chdir(ROOT)
    options = recipe(tmp_path, records)
    kept = tmp_path / "runs" / "checkpoints"
    folders = ["--trainer.default_root_dir", str(kept.parent), "--trainer.callbacks.init_args.dirpath", str(kept)]
    command = ["fit", "--config", str(tmp_path / "config.yaml"), *options, *folders, "--ckpt_path", "last"]
    logs = []
    for steps in ("1", "2"):
        arguments = {"arguments": [*command, "--trainer.devices", "2", "--trainer.max_steps", steps]}
        job = Job(f"fit {steps}", "tests.recipes.commands:flowtrain", 2, arguments, deadline=SECONDS)
        logs.append(run_jobs(tmp_path, [job])[job.name].check().log)
    assert "there is no checkpoint below" in logs[0]
    assert f'ckpt_path="last" is {kept}/' in logs[1]
    assert ", saved after step 1 in epoch 0." in logs[1]
    assert max(read_index(path).lightning["global_step"] for path in kept.iterdir()) == 2
