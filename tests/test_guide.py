"""The examples of the guide run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flowtrain_lightning.data import ImageProcessor
from tests.exactness.layouts import trainer_for
from tests.tiny import IMAGES, tiny_data, write_records

GUIDE = (Path(__file__).parents[1] / "docs/guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


def train(module: Any, images: ImageProcessor, folder: Path) -> float:
    """The loss of two steps."""
    module.save_hyperparameters({"learning_rate": 1e-2})
    write_records(folder, 16)
    trainer = trainer_for("auto", max_steps=2, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(module, tiny_data(folder, images=images))
    return float(trainer.callback_metrics["train_loss"])


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
    assert 0 < train(module, IMAGES, tmp_path) < 10
    assert all(parameter.grad is not None for _, parameter in module.model.model.visual.named_parameters())


def test_a_tower_for_pictures_of_one_size_trains(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**small, num_hidden_layers=1, vocab_size=256),
        vision_config=transformers.CLIPVisionConfig(**small, num_hidden_layers=2, image_size=16, patch_size=4),
    )
    names: dict[str, Any] = {}
    for block in BLOCKS[:3]:
        exec(block, names)

    class Llava(names["MyVLM"]):  # type: ignore[misc]
        halves: ClassVar[Any] = {
            "encoder": ("model.model.vision_tower", "model.model.multi_modal_projector"),
            "backbone": ("model.model.language_model", "model.lm_head"),
        }
        encode = names["encode"]

        def configure_whole(self) -> None:
            self.model = transformers.LlavaForConditionalGeneration(config)

        def backbone_step(self, batch: Any, features: Any, stage: str) -> Any:
            text = self.model.model.language_model
            embeddings = text.embed_tokens(batch.tokens)
            if "image" in features:
                embeddings = embeddings.index_copy(0, batch.media_positions["image"], features["image"])
            outputs = text(inputs_embeds=embeddings[None], use_cache=False).last_hidden_state[0]
            return self.loss(self.model.lm_head(outputs), batch)

    module = Llava()
    images = ImageProcessor(patch_size=4, merge_size=1, fixed_size=(16, 16))
    assert 0 < train(module, images, tmp_path) < 10
    assert any(parameter.grad is not None for parameter in module.model.model.vision_tower.parameters())
