"""Frozen weights in bfloat16 beside adapters in float32: half the memory, and the same bits under mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowtrain_lightning as flow
from tests.checkpoint.test_resume import same
from tests.exactness.layouts import trainer_for
from tests.models.test_families import Samples, ours
from tests.models.tiny import FAMILIES
from tests.tiny import tiny_data, write_records

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LORA = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", "init_lora_weights": False}


def published_in_bf16(family: str) -> Any:
    """A module with adapters, of whose other weights no number needs more than 16 bits."""
    torch.manual_seed(1)
    module = FAMILIES[family].kind(FAMILIES[family].config, adapters=LORA)
    module.configure_model()
    for weight in module.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.bfloat16().float()
    return module


@pytest.mark.parametrize("family", ["qwen2_vl, tied", "qwen3_vl_moe", "gemma3"])
def test_under_mixed_precision_nothing_changes_to_the_bit(tmp_path: Path, family: str):
    samples, module = Samples(tmp_path, FAMILIES[family]), published_in_bf16(family)
    half = FAMILIES[family].kind(FAMILIES[family].config, adapters=LORA, frozen_in_bf16=True)
    half.configure_model()
    half.load_state_dict(module.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(half, samples), ours(module, samples)
    assert same(found, expected)
    linear = [layer for layer in half.model.modules() if isinstance(layer, nn.Linear)]
    dtypes = {weight.dtype for layer in linear for weight in layer.parameters() if weight.requires_grad}
    assert dtypes == {torch.float32}, "adapters"
    assert sum(layer.weight.dtype == torch.bfloat16 for layer in linear) > 10
    assert half.model.get_input_embeddings().weight.dtype == torch.float32
    experts = [weight for name, weight in half.named_parameters() if ".experts." in name]
    assert {weight.dtype for weight in experts} <= {torch.bfloat16}


def test_another_precision_is_refused(tmp_path):
    write_records(tmp_path, 2)
    module = flow.models.QwenVLM(FAMILIES["qwen2_vl"].config, frozen="model.visual", frozen_in_bf16=True)
    trainer = trainer_for("auto", max_steps=1)
    with pytest.raises(ValueError, match=r"frozen_in_bf16 keeps weights in bfloat16, but .*'32-true'"):
        trainer.fit(module, datamodule=tiny_data(tmp_path, global_batch_size=2))


def test_weights_that_train_later_are_refused(tmp_path):
    family = FAMILIES["qwen2_vl"]
    module = family.kind(family.config, frozen="model.visual", frozen_in_bf16=True)
    module.configure_model()
    samples = Samples(tmp_path, family)
    with torch.autocast("cpu", torch.bfloat16):
        ours(module, samples)
        module.model.model.visual.requires_grad_(True)  # as `on_train_epoch_start` may do
        with pytest.raises(ValueError, match=r"frozen_in_bf16 .* of a Linear train since.*Leave frozen_in_bf16 out"):
            ours(module, samples)


def test_a_folder_whose_first_weight_is_in_bf16_opens_without_rounding_others(tmp_path):
    family = FAMILIES["qwen2_vl"]
    module = family.kind(family.config, frozen="model.visual", frozen_in_bf16=True)
    module.configure_model()
    module.model.model.visual.patch_embed.bfloat16()  # a linear layer in other families
    assert module.model.dtype == torch.bfloat16
    module.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    for name, weight in module.model.state_dict().items():
        assert again.state_dict()[name].float().equal(weight.float()), name
