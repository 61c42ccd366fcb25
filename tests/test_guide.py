"""The examples of the guide run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.layouts import trainer_for
from tests.tiny import IMAGES, tiny_data, write_records

GUIDE = (Path(__file__).parents[1] / "docs/guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_model_from_hugging_face_trains(tmp_path):
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": IMAGES.patch_size}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "num_key_value_heads": 2, "vocab_size": 256, "rope_scaling": rope},
        vision_config={**vision, "spatial_merge_size": IMAGES.merge_size},
    )
    names: dict[str, Any] = {}
    for block in BLOCKS[:2]:
        exec(block, names)
    plain, qwen = names["MyVLM"], names["QwenVLM"]
    module = type("Trained", (qwen,), {"loss": plain.loss, "configure_optimizers": plain.configure_optimizers})(config)
    module.save_hyperparameters({"learning_rate": 1e-2})
    write_records(tmp_path, 16)
    trainer = trainer_for("auto", max_steps=2, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(module, tiny_data(tmp_path))
    assert 0 < float(trainer.callback_metrics["train_loss"]) < 10
    assert all(parameter.grad is not None for _, parameter in module.model.model.visual.named_parameters())
