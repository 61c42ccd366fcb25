"""What stands on the page for those who come from somewhere else runs, on small models."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia
from tests.exactness.layouts import trainer_for
from tests.models.test_pretrained import published, records
from tests.tiny import CharTokenizer, write_records

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text(encoding="utf-8")
THEIRS, FROM_TRAINER, FROM_LLAVA, PADDED, SPLIT = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

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


def pad(batch: PackedBatch, media: PackedMedia) -> dict[str, torch.Tensor]:
    """The same microbatch as a collator makes it, whose labels are not shifted."""
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    tokens = torch.zeros(len(bounds), batch.max_seqlen, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, (start, stop) in enumerate(bounds):
        tokens[row, : stop - start] = batch.tokens[start:stop]
        labels[row, 1 : stop - start] = batch.labels[start : stop - 1]
    return {"tokens": tokens, "labels": labels, "images": media.images()}


@pytest.mark.checks_packing
def test_a_plain_module_and_the_one_it_becomes_have_the_same_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path, 8)
    written = SPLIT.replace('"tokenizer.json"', "tokenizer").replace("Split()", "module")
    module_of, _, fit = re.sub(r"L\.Trainer\(.*?\)", "trainer", written).partition("images = ")
    names: dict[str, Any] = {"tokenizer": CharTokenizer()}
    names["trainer"] = trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    exec(module_of, names)
    module = names["module"] = names["Split"](CharTokenizer.vocabulary, 32)
    exec("images = " + fit, names)
    step = next(step for step in names["data"].train_dataloader() if step.read_by(0))
    batch, ((_, media),) = step.microbatches[0], step.read_by(0)
    loss, tokens = module.backbone_step(batch, {"image": module.encode(media)}, "train")
    padded: dict[str, Any] = {}
    exec(PADDED, padded)
    plain = padded["Plain"](CharTokenizer.vocabulary, 32)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(loss / tokens, plain.training_step(pad(batch, media), 0))
