"""What stands on the page for those who come from somewhere else runs, on small models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness.layouts import trainer_for
from tests.models.test_pretrained import published, records

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text(encoding="utf-8")
THEIRS, FROM_TRAINER, FROM_LLAVA = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

__all__ = ["records"]  # a fixture


def run(block: str, folder: Path, **replaced: str) -> dict[str, Any]:
    """Runs a block with a small model and small data in place of its own, and gives the names that it defines."""
    for pattern, name in replaced.items():
        block, often = re.subn(rf'"[^"]*{pattern}[^"]*"', repr(name), block)
        assert often, pattern
    block, trainers = re.subn(r"L\.Trainer\(.*?\)", "new_trainer()", block)
    assert trainers
    names: dict[str, Any] = {
        "new_trainer": lambda: trainer_for("auto", max_steps=2, limit_val_batches=0, default_root_dir=folder)
    }
    exec(re.sub(r"global_batch_size=\d+", "global_batch_size=2", block), names)
    return names


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, weight in after.items() if not weight.equal(before[name])}


def test_what_others_write_is_marked_as_not_run():
    assert THEIRS.startswith("# before: no test")


def test_a_fine_tune_as_transformers_schedules_it(tmp_path, records):
    folder = published(tmp_path / "model", "qwen2_5_vl")
    names = run(FROM_TRAINER, tmp_path, Qwen=str(folder), jsonl=str(records))
    trained = {name for name, weight in names["model"].named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert names["trainer"].optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)  # after the last step


def test_the_projector_first_and_then_the_rest(tmp_path, records, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = published(tmp_path / "model", "llava")
    first, second = FROM_LLAVA.split("# scripts/finetune.sh")
    names = run(first, tmp_path, llava=str(folder), pretrain=str(records))
    begun = weights(transformers.AutoModelForImageTextToText.from_pretrained(folder))
    projected = weights(names["model"].model)
    assert changed(begun, projected)
    assert all("multi_modal_projector" in name for name in changed(begun, projected))
    names = run("import flowtrain_lightning as flow\n#" + second, tmp_path, finetune=str(records))
    tuned = changed(projected, weights(names["model"].model))
    assert any("language_model" in name for name in tuned)
    assert not any("vision_tower" in name for name in tuned)
