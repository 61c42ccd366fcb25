"""LoRA and DoRA on either half: exact beside peft's own model, and saved as a folder that peft opens."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flowtrain_lightning as flow
from tests.exactness.compare import error
from tests.models.test_families import Samples, ours, theirs
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

QWEN = FAMILIES["qwen2_5_vl"].config
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
HALVES = {"both": "all-linear", "backbone": r".*language_model.*(q_proj|down_proj)", "encoder": r".*visual.*(qkv|proj)"}


def with_adapters(target: str, model: Any = QWEN, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False, **settings)
    module = flow.models.QwenVLM(model, adapters=config)
    module.configure_model()
    return module


@pytest.mark.parametrize(
    ("family", "half", "settings"),
    [
        ("qwen2_5_vl", "both", {}),
        ("qwen2_5_vl", "backbone", {"use_dora": True}),
        ("qwen2_5_vl", "encoder", {}),
        ("qwen3_vl_moe", "backbone", {"target_parameters": EXPERTS}),
    ],
)
def test_logits_and_gradients_are_those_of_pefts_model(tmp_path: Path, family: str, half: str, settings: Any):
    samples, config = Samples(tmp_path, FAMILIES[family]), FAMILIES[family].config
    torch.set_default_dtype(torch.float64)
    try:
        module = with_adapters(HALVES[half], config, **settings)
        found = ours(module, samples)
        module.model.save_pretrained(tmp_path / "adapters")
        weights = {name.replace(".base_layer", ""): weight for name, weight in module.model.state_dict().items()}
        base = type(module.model)(type(module.model.config)(**copy.deepcopy(config)))
        base.set_experts_implementation("eager")  # by default some know no float64
        base.load_state_dict({name: weights[name] for name in base.state_dict()})
        reference = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)
        expected = theirs(reference, samples)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-9)
    prefix = "base_model.model."
    of_peft = {name.removeprefix(prefix): gradient for name, gradient in expected["gradients"].items()}
    assert error(found["gradients"], of_peft) <= 1e-9
    trained = {name for name, gradient in found["gradients"].items() if gradient is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    assert half == "both" or len({"visual" in name for name in trained}) == 1


def test_a_checkpoint_keeps_what_the_adapters_are():
    module = with_adapters("all-linear", use_dora=True)
    again = flow.models.QwenVLM(**module.hparams)
    again.configure_model()
    again.load_state_dict(module.state_dict())
    assert again.model.peft_config["default"].use_dora
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in module.named_parameters() if p.requires_grad
    }


def test_what_is_no_config_of_peft_is_refused():
    with pytest.raises(TypeError, match=r"adapters is a dict, but must be a config of peft"):
        flow.models.QwenVLM(QWEN, adapters={"r": 8})


def test_without_peft_it_is_said_how_to_install_it(monkeypatch):
    config = peft.LoraConfig(target_modules="all-linear").to_dict()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"need peft; install it with: pip install .*\[peft\]"):
        flow.models.QwenVLM(QWEN, adapters=config).configure_model()
