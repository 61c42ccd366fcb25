"""A model's name or folder is enough: the data module takes tokenizer, template and images from the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.data import ChatTemplate, DataError
from flowtrain_lightning.placement.run_costs import first_steps

transformers = pytest.importorskip("transformers")

from tests.models.processors import PUBLISHED  # noqa: E402

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {**TOWER, "image_size": 56, "patch_size": 14}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 14,
        },
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SQUARE, "model_type": "clip_vision_model"},
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**SQUARE, "image_size": [56, 56], "patch_size": [14, 14]},
        "image_seq_length": 4,
    },
    "smolvlm": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SQUARE, "model_type": "smolvlm_vision"},
        "scale_factor": 2,
    },
}
IMAGE_TOKENS = {"qwen2_5_vl": "<|image_pad|>", "llava": "<image>", "internvl": "<IMG_CONTEXT>", "smolvlm": "<image>"}


def published(folder: Path, family: str, **changes: Any) -> Path:
    """A folder as a model is published in: weights, config, tokenizer, chat template, image processor."""
    family_of = PUBLISHED[family]
    tokenizer = family_of.tokenizer()
    config = json.loads(json.dumps(CONFIGS[family]))
    config["text_config"]["vocab_size"] = len(tokenizer)
    config |= {"image_token_id": tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[family]), **changes}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(family, **config), dtype=torch.float32
    )
    for part in (model, tokenizer, family_of.image_processor()):
        part.save_pretrained(folder)
    template = Path(__file__).parent / "chat_templates" / family_of.template
    (folder / "chat_template.jinja").write_text(template.read_text())
    return folder


@pytest.fixture
def records(tmp_path: Path) -> Path:
    lines = []
    for number, (height, width) in enumerate([(40, 60), (90, 130), (200, 70), (56, 56)]):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "\n\nA cat."}]
        lines.append(json.dumps({"images": [f"{number}.png"], "messages": turns}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return tmp_path / "train.jsonl"


def data_of(records: Path, **settings: Any) -> flow.FlowDataModule:
    return flow.FlowDataModule(records, token_budget=1024, global_batch_size=2, **settings)


def trainer(folder: Path) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(strategy="auto", accelerator="cpu", devices=1, max_steps=2, default_root_dir=folder, **quiet)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_name_is_enough_to_train(tmp_path, records, family):
    model = flow.models.from_pretrained(published(tmp_path / "model", family), lr=1e-3)
    before = {name: weight.clone() for name, weight in _built(model).items()}
    data = data_of(records)
    run = trainer(tmp_path)
    run.fit(model, data)
    assert run.global_step == 2
    assert data.template.fingerprint == model.template.fingerprint
    assert data.images.fingerprint == model.images.fingerprint
    changed = {name for name, weight in model.named_parameters() if not weight.equal(before[name])}
    for half in model.halves.values():
        assert any(name.startswith(half) for name in changed), half


def _built(module: Any) -> dict[str, torch.Tensor]:
    kind = type(module)(module.hparams["processor"])
    kind.configure_model()
    return dict(kind.named_parameters())


def test_gradient_checkpointing_is_another_word_for_recompute(tmp_path):
    folder = published(tmp_path, "qwen2_5_vl")
    assert flow.models.from_pretrained(folder, gradient_checkpointing=True).hparams["recompute"] is True
    with pytest.raises(TypeError, match="called recompute here"):
        flow.models.from_pretrained(folder, gradient_checkpointing=True, recompute=False)


def test_a_module_of_a_config_alone_says_that_it_reads_nothing_yet():
    module = flow.models.QwenVLM({"model_type": "qwen2_5_vl", **CONFIGS["qwen2_5_vl"]})
    assert module.processor is None
    with pytest.raises(ValueError, match=r"names no tokenizer, .* QwenVLM\(..., processor=FOLDER\)"):
        _ = module.template


def test_all_parts_are_given(tmp_path):
    model = flow.models.from_pretrained(published(tmp_path, "qwen2_5_vl"), max_pixels=20_000)
    assert isinstance(model, flow.models.QwenVLM)
    assert model.images.max_pixels == 20_000
    assert model.tokenizer.token_to_id("<|image_pad|>") == model.template.image_id(model.tokenizer)


def test_a_checkpoint_still_names_what_the_model_reads(tmp_path, records):
    module = flow.models.from_pretrained(published(tmp_path / "model", "qwen2_5_vl"), max_pixels=20_000)
    run = trainer(tmp_path)
    run.fit(module, data_of(records))
    run.save_checkpoint(tmp_path / "last.ckpt")
    again = flow.models.QwenVLM.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.processor is not None
    assert again.processor.template.fingerprint == module.processor.template.fingerprint
    assert again.processor.images.max_pixels == 20_000


def test_a_saved_folder_reads_as_the_model_that_it_came_from(tmp_path):
    model = flow.models.from_pretrained(published(tmp_path / "model", "qwen2_5_vl"))
    model.configure_model()
    model.save_pretrained(tmp_path / "tuned")
    again = flow.models.from_pretrained(tmp_path / "tuned")
    assert again.template.fingerprint == model.template.fingerprint
    assert again.images.fingerprint == model.images.fingerprint
    again.configure_model()
    for name, weight in model.state_dict().items():
        assert weight.equal(again.state_dict()[name]), name
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned").chat_template == template


@pytest.mark.parametrize("bounds", [{"max_pixels": 20_000}, {"min_pixels": 4_000, "max_pixels": 9_000}], ids=str)
@pytest.mark.parametrize("files", ["as published before", "as published today"])
def test_a_saved_folder_reads_images_of_the_size_that_the_user_gave(tmp_path, bounds, files):
    base = published(tmp_path / "model", "qwen2_5_vl")
    images = base / "preprocessor_config.json"
    settings = json.loads(images.read_text())
    if files == "as published before":
        settings |= {"min_pixels": settings["size"]["shortest_edge"], "max_pixels": settings["size"]["longest_edge"]}
        images.write_text(json.dumps(settings))
    else:
        images.unlink()
        (base / "processor_config.json").write_text(json.dumps({"image_processor": settings, "video_processor": {}}))
    model = flow.models.from_pretrained(base, **bounds)
    model.configure_model()
    model.save_pretrained(tmp_path / "tuned")
    again = flow.models.from_pretrained(tmp_path / "tuned")
    assert again.images.fingerprint == model.images.fingerprint
    assert again.videos == model.videos
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path / "tuned", backend="pil")
    assert theirs.size["longest_edge"] == bounds["max_pixels"]
    sides = [again.images.size(900, 700), again.images.size(9, 9)]
    assert [theirs.get_number_of_image_patches(*each, {}) for each in ((900, 700), (9, 9))] == [h * w for h, w in sides]


def test_what_the_user_gives_comes_before_what_the_model_says(tmp_path, records):
    module = flow.models.from_pretrained(published(tmp_path / "model", "qwen2_5_vl"))
    data = data_of(records, template=ChatTemplate(end="<|im_end|>"))
    trainer(tmp_path).fit(module, data)
    assert isinstance(data.template, ChatTemplate)
    assert data.images == module.processor.images


def test_a_template_that_writes_another_token_than_the_model_looks_for_is_refused(tmp_path, records):
    module = flow.models.from_pretrained(published(tmp_path / "model", "qwen2_5_vl", image_token_id=5))
    with pytest.raises(ValueError, match=r"writes token \d+ for a row of features, but the model looks for 5"):
        trainer(tmp_path).fit(module, data_of(records))


def test_data_without_a_tokenizer_need_a_model_that_names_one(tmp_path, records):
    data = data_of(records)
    with pytest.raises(DataError, match=r"FlowDataModule has no tokenizer\. Give one"):
        data.setup("fit")


def test_a_data_module_without_a_trainer_can_be_told_the_model(tmp_path, records):
    model = flow.models.from_pretrained(published(tmp_path / "model", "qwen2_5_vl"))
    data = data_of(records)
    data.read_as(model)
    data.setup("fit")
    assert data.template.fingerprint == model.template.fingerprint


def test_a_placement_is_planned_by_steps_of_what_the_model_reads(tmp_path, records):
    module = flow.models.from_pretrained(published(tmp_path / "model", "qwen2_5_vl"))
    data, run = data_of(records), trainer(tmp_path)
    run.strategy.connect(module)
    data.trainer = run
    plans = first_steps(data)(default_allocation(2), 2)
    assert len(plans) == 2
    assert data.trainer is run


def test_a_family_that_nothing_trains_is_named(tmp_path):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertConfig(**small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Models of type 'bert' are none of images and text"):
        flow.models.from_pretrained(tmp_path)
    transformers.BlipConfig(vision_config=small, text_config=small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BlipForConditionalGeneration has no get_image_features"):
        flow.models.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/no/model", "./model", "~/model", Path("no/model")])
def test_a_folder_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match=f"There is no folder {name}; give the folder of a model, or its name on"):
        flow.models.from_pretrained(name)


def test_a_folder_without_tokenizer_or_template_is_told(tmp_path):
    PUBLISHED["qwen2_vl"].config().save_pretrained(tmp_path)
    PUBLISHED["qwen2_vl"].image_processor().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer that transformers can open"):
        flow.models.processor_of(tmp_path / "nowhere")
    PUBLISHED["qwen2_vl"].tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        flow.models.processor_of(tmp_path)
