"""What users of other libraries would write is refused by name, in a sentence that says what to do here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.models.refused_arguments import refuse_other_arguments

transformers = pytest.importorskip("transformers")

from tests.models.tiny import FAMILIES  # noqa: E402

CONFIG = FAMILIES["qwen2_5_vl"].config
WORDS = {
    "load_in_4bit": (True, "of 4 or 8 bits are not trained .* frozen_in_bf16=True"),
    "load_in_8bit": (True, "of 4 or 8 bits are not trained"),
    "quantization_config": ({"load_in_4bit": True}, "of 4 or 8 bits are not trained"),
    "attn_implementation": ("flash_attention_2", "attention is set here"),
    "torch_dtype": ("bfloat16", r"Trainer\(precision='bf16-mixed'\)"),
    "dtype": ("auto", r"Trainer\(precision='bf16-mixed'\)"),
    "device_map": ("auto", r"Trainer\(devices=8, strategy=FlowTrainStrategy"),
    "trust_remote_code": (True, "never runs"),
    "gradient_checkpointing": (True, "called recompute here"),
    "revision": ("main", r"snapshot_download\(revision=...\)"),
    "learning_rate": (1e-4, "called lr here"),
}


@pytest.mark.parametrize("argument", WORDS)
def test_an_argument_of_another_library_is_refused_by_a_sentence(argument: str) -> None:
    value, words = WORDS[argument]
    given: dict[str, Any] = {argument: value}
    with pytest.raises(TypeError, match=f"^QwenVLM takes no {argument}. .*{words}"):
        flow.models.QwenVLM(CONFIG, **given)


def test_an_argument_that_a_class_has_is_its_own() -> None:
    class Own(flow.models.QwenVLM):
        def __init__(self, model: Any, dtype: str) -> None:
            super().__init__(model)
            self.own = dtype

    assert Own(CONFIG, dtype="mine").own == "mine"
    refuse_other_arguments(lambda *, device_map: device_map, "f", ["device_map"])


def _folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    transformers.AutoConfig.for_model(**CONFIG).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return folder


@pytest.mark.parametrize(
    "quantized",
    [
        {"quantization_config": {"quant_method": method, "load_in_4bit": True}}
        for method in ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "mxfp4", "of tomorrow")
    ]
    + [
        {"compression_config": {"format": "pack-quantized"}},
        {"text_config": {**CONFIG["text_config"], "quantization_config": {"quant_method": "fp8"}}},
    ],
    ids=str,
)
def test_quantized_weights_are_refused_wherever_they_are_named(tmp_path: Path, quantized: dict[str, Any]) -> None:
    folder = _folder(tmp_path / "model", **quantized)
    sentence = "has quantized weights .* which are not trained here. Give the model that it was made from"
    for make in (flow.models.from_pretrained, flow.models.QwenVLM):
        with pytest.raises(ValueError, match=sentence):
            make(folder)
    with pytest.raises(ValueError, match=sentence):
        flow.models.QwenVLM({**CONFIG, **quantized})


def test_a_folder_that_says_it_is_not_quantized_is_taken(tmp_path: Path) -> None:
    flow.models.QwenVLM(_folder(tmp_path / "model", quantization_config=None))


def test_a_model_in_memory_is_refused() -> None:
    config = transformers.AutoConfig.for_model(**CONFIG)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with pytest.raises(TypeError, match=r"from_pretrained takes the name or folder .* got a Qwen2_5_VLFor.*save_pretr"):
        flow.models.from_pretrained(model)
    with pytest.raises(TypeError, match=r"given as a Qwen2_5_VLFor.* but every rank builds its own part"):
        flow.models.QwenVLM(model)
    with pytest.raises(TypeError, match=r"got a Qwen2_5_VLConfig.* such as QwenVLM\(config\)"):
        flow.models.from_pretrained(config)
    assert flow.models.QwenVLM(config).hparams["model"]["model_type"] == "qwen2_5_vl"


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str = "") -> str:
        pytest.fail(f"somebody was asked: {prompt}")

    monkeypatch.setattr("builtins.input", asked)


@pytest.mark.usefixtures("unasked")
def test_no_code_of_a_folder_runs_and_nobody_is_asked(tmp_path: Path) -> None:
    code = {"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.Model"}
    folder = _folder(tmp_path / "model", model_type="mine", auto_map=code)
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    for make in (flow.models.from_pretrained, flow.models.QwenVLM, flow.models.videos_of):
        with pytest.raises(ValueError, match=r"only be opened by Python code that comes with it .* never runs"):
            make(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Config"}})
    )
    with pytest.raises(ValueError, match=r"only be opened by Python code that comes with it"):
        flow.models.images_of(folder)
    with pytest.raises(ValueError, match="has no tokenizer that transformers can open"):
        flow.models.processor_of(folder)
    known = _folder(tmp_path / "known", auto_map=code)  # of a family that transformers has: its own code is taken
    (known / "own.py").write_text((folder / "own.py").read_text())
    assert flow.models.QwenVLM(known).hparams["model"]["model_type"] == "qwen2_5_vl"
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no config.json that can be read"), ("{}", "names no model_type"), (None, "names no model_type|no config")],
)
def test_a_folder_without_a_readable_config_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        flow.models.from_pretrained(tmp_path)


def test_a_name_that_is_nowhere_is_told_with_the_folder_that_was_looked_in() -> None:
    with pytest.raises(ValueError, match=r"No model 'my/own/folder' was found: .* has no such folder, and the"):
        flow.models.from_pretrained("my/own/folder")
