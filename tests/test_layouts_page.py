"""The examples of the page on layouts run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.placement.request import make_request
from tests.exactness.layouts import trainer_for
from tests.tiny import CharTokenizer, write_records

PAGE = (Path(__file__).parents[1] / "docs/layouts.md").read_text(encoding="utf-8")
(SECTION,) = re.findall(r"## An encoder for each modality\n(.*?)\n## ", PAGE, flags=re.DOTALL)
MODULE, STRATEGY, RENAMED, SOURCE = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
(ALLOCATION,) = re.findall(r"```yaml\n(.*?)```", SECTION, flags=re.DOTALL)


def test_a_module_of_two_encoders_trains_on_images_of_a_file_and_audio_of_a_source(tmp_path, monkeypatch):
    names: dict[str, Any] = {}
    exec(MODULE, names)
    exec(SOURCE, names)
    frames = [3, 12, 5, 8]
    for number, count in enumerate(frames):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(number).random((count, 80), dtype=np.float32))
    paths = [tmp_path / f"{number}.npy" for number in range(len(frames))]
    recordings = names["Recordings"](paths, frames, [[20, 30], [40], [50, 60], [70]])
    data = FlowDataModule(
        [write_records(tmp_path, 8), recordings],
        token_budget=512,
        global_batch_size=12,
        tokenizer=CharTokenizer(),
    )
    exec(RENAMED, names)
    for kind in ("SeesAndHears", "Reader"):
        module = names[kind]()
        trainer = trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
        trainer.fit(module, data)
        assert 0 < float(trainer.callback_metrics["train_loss"]) < 20
        assert module.eye.weight.grad is not None
        assert module.ear.weight.grad is not None

    monkeypatch.chdir(tmp_path)
    Path("allocation.yaml").write_text(ALLOCATION)
    exec(STRATEGY, names)
    allocation, graph = read_plan(Path("allocation.yaml")), names["SeesAndHears"]().role_graph
    assert make_request("allocation.yaml", None, None, "auto").answer(8, graph=graph) == allocation.bound(graph)


def test_a_module_with_a_generator_learns_to_draw_what_records_have_generated(tmp_path):
    (section,) = re.findall(r"## A generator behind the backbone\n(.*?)\n## ", PAGE, flags=re.DOTALL)
    (module,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (part,) = re.findall(r'`(\{"type": "image".*?\})`', section)
    names: dict[str, Any] = {}
    exec(MODULE, names)
    exec(module, names)
    write_records(tmp_path, 4)
    Image.new("RGB", (56, 56)).save(tmp_path / "cat.png")
    turns = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [json.loads(part)]}]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"messages": turns}) + "\n")
    data = FlowDataModule(tmp_path / "train.jsonl", token_budget=512, global_batch_size=5, tokenizer=CharTokenizer())
    model, trainer = names["Draws"](), trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(model, data)
    assert float(trainer.callback_metrics["train_generator_loss"]) > 0
    for trained in (model.drawer.weight, model.queries.weight):
        assert trained.grad.abs().sum() > 0
