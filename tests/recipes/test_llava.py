"""The two stages of LLaVA train a small model of that family from their YAML files, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flowtrain_lightning.cli import main
from tests.models.test_pretrained import published, records

transformers = pytest.importorskip("transformers")

RECIPE = Path(__file__).parents[2] / "recipes" / "llava"
FIT = ["--data.global_batch_size", "2", "--data.token_budget", "512", "--data.num_workers", "0"]
FIT += ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]
FIT += ["--trainer.val_check_interval", "1", "--trainer.limit_val_batches", "1"]

__all__ = ["records"]  # a fixture


def flowtrain(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["flowtrain", *map(str, arguments)])
    main()


def weights(folder: Path) -> dict[str, object]:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def changed(before: Path, after: Path) -> set[str]:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name, weight in new.items() if not weight.equal(old[name])}


@pytest.mark.full
def test_first_the_projector_trains_and_then_the_language_model_too(tmp_path, records, monkeypatch, caplog):
    caplog.set_level("INFO")
    stages = {"base": published(tmp_path / "base", "llava"), "projected": tmp_path / "projected"}
    named = {"models/llava": stages["base"], "models/llava-projected": stages["projected"]}
    data = ["--data.train", records, "--data.val", records]
    for file, model in (("projector.yaml", "models/llava"), ("all.yaml", "models/llava-projected")):
        runs, tuned = (
            tmp_path / f"runs of {file}",
            tmp_path / file.removesuffix(".yaml").replace("projector", "projected"),
        )
        text = (RECIPE / file).read_text(encoding="utf-8")
        assert f"model: {model}  #" in text
        config = tmp_path / file
        config.write_text(text.replace(f"model: {model}  #", f"model: {named[model]}  #"))
        folders = ["--trainer.default_root_dir", runs, "--trainer.callbacks.init_args.dirpath", runs / "checkpoints"]
        fit = ["fit", "--config", config, *data, *folders, *FIT, "--ckpt_path", "last", "--trainer.max_steps"]
        flowtrain(monkeypatch, *fit, "1")
        assert f"no checkpoint below {runs}, so training begins" in caplog.text
        (last,) = runs.rglob("last.ckpt")
        flowtrain(monkeypatch, "export", "--format", "hf", last, tuned)
    first, second = changed(stages["base"], stages["projected"]), changed(stages["projected"], tmp_path / "all")
    assert first
    assert all("multi_modal_projector" in name for name in first)
    assert any("language_model" in name for name in second)
    assert not any("vision_tower" in name for name in second)
