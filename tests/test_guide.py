"""The examples of the guide run."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import ROLES
from flowtrain_lightning.data import ImageProcessor
from tests.exactness.layouts import trainer_for
from tests.tiny import IMAGES, CharTokenizer, tiny_data, write_records

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
OWN_MODULE, OTHER_LOSS, PRETRAINED, OWN_FAMILY, SECTIONS, POOL = re.findall(
    r"```python\n(.*?)```", GUIDE, flags=re.DOTALL
)

(SECTIONS_IN_YAML,) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)

TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def trainer(folder: Path) -> Any:
    return trainer_for("auto", max_steps=2, limit_val_batches=0, default_root_dir=folder)


def run(*blocks: str) -> dict[str, Any]:
    """The names that the blocks define."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    return names


@pytest.mark.checks_packing
@pytest.mark.parametrize("name", ["MyVLM", "Scores"])
def test_the_module_of_one_s_own_trains_and_passes_the_check(tmp_path, name):
    write_records(tmp_path, 16)
    sizes = {"vocabulary": CharTokenizer.vocabulary, "width": 64, "depth": 1, "longest": 1024}
    module = run(OWN_MODULE, OTHER_LOSS)[name](patch_dim=IMAGES.patch_dim, **sizes)
    ran = trainer(tmp_path)
    ran.fit(module, tiny_data(tmp_path))
    assert 0 < float(ran.callback_metrics["train_loss"]) < 10
    assert all(weight.grad is not None for weight in module.parameters())


def write_pretrained(folder: Path) -> None:
    """A model of Hugging Face with all that its folder holds."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2VLConfig(
        text_config={
            **TEXT,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": IMAGES.patch_size},
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "recipes/quickstart/tokenizer.json"))
    config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    sizes = {"patch_size": IMAGES.patch_size, "min_pixels": IMAGES.min_pixels}
    transformers.Qwen2VLImageProcessorPil(**sizes).save_pretrained(folder)
    tokenizer.chat_template = (ROOT / "tests/models/chat_templates/qwen2_5_vl.jinja").read_text()
    tokenizer.save_pretrained(folder)


def test_a_pretrained_model_from_hugging_face_trains(tmp_path, monkeypatch):
    write_pretrained(tmp_path / "model")
    write_records(tmp_path, 128)
    monkeypatch.chdir(tmp_path)
    block = PRETRAINED.replace('"Qwen/Qwen2-VL-2B-Instruct"', '"model"')
    block, ours = re.subn(r"L\.Trainer\(.*?\)", "new_trainer", block)
    assert ours == 1
    ran = trainer(tmp_path)
    names: dict[str, Any] = {"new_trainer": ran}
    exec(block, names)
    assert 0 < float(ran.callback_metrics["train_loss"]) < 10
    assert all(weight.grad is not None for weight in names["model"].parameters())


def test_another_family_trains(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.InternVLConfig(
        text_config={**TEXT, "num_key_value_heads": 2, "model_type": "qwen2", "vocab_size": 256},
        vision_config={**small, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=CharTokenizer().token_to_id("<|image_pad|>"),
    )
    module = run(OWN_MODULE, OWN_FAMILY)["OneTileVLM"](config)
    write_records(tmp_path, 16)
    images = ImageProcessor(patch_size=4, merge_size=2, fixed_size=(16, 16))
    ran = trainer(tmp_path)
    ran.fit(module, tiny_data(tmp_path, images=images))
    assert 0 < float(ran.callback_metrics["train_loss"]) < 10
    assert any(weight.grad is not None for weight in module.model.model.vision_tower.parameters())


def test_sections_of_the_data_module_say_in_yaml_what_they_say_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cost = {"linear": 1.0, "quadratic": 0.0, "constant": 0.0}
    (tmp_path / "profile.json").write_text(json.dumps({"roles": {role: {"cost": cost} for role in ROLES}}))
    data = run("import flowtrain_lightning as flow", SECTIONS)["data"]
    sections = yaml.safe_load(textwrap.dedent(SECTIONS_IN_YAML))
    assert data.index == flow.IndexConfig(**sections["index"])
    assert data.packing == flow.PackingConfig(**sections["packing"]).with_profile_read()
    assert data.token_steps == flow.TokenSteps(**sections["token_steps"])


def test_the_section_about_the_pool_is_what_the_strategy_takes():
    strategy = run("import flowtrain_lightning as flow", POOL)["strategy"]
    assert strategy.pool == flow.PoolSettings(bytes=4 << 30, tier="host", network="nixl")
    assert strategy.encoder_activations == 0
