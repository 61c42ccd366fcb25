"""Building modules of Hugging Face models: from a folder or a config, frozen or not, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flowtrain_lightning as flow
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.models import own_forward
from flowtrain_lightning.parallel.halves import fill_half
from flowtrain_lightning.placement.meta_device import copy_on_meta
from flowtrain_lightning.placement.module_profile import profile_module
from tests.models.tiny import FAMILIES
from tests.tiny import tiny_data, write_records

transformers = pytest.importorskip("transformers")

QWEN = FAMILIES["qwen2_vl"].config


def built(model: Any = QWEN, **settings: Any) -> Any:
    module = flow.models.QwenVLM(model, **settings)
    module.configure_model()
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pretrained model."""
    built().model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", [str, Path])
def test_a_folder_gives_its_weights(folder, given):
    expected = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder)
    found = built(given(folder))
    assert found.model.training
    for (name, weight), (_, other) in zip(found.model.named_parameters(), expected.named_parameters(), strict=True):
        assert weight.equal(other), name


def test_a_config_object_is_as_good_as_its_dictionary():
    config = transformers.Qwen2VLConfig(**QWEN)
    assert built(config).hparams == built(QWEN).hparams
    assert config.text_config._attn_implementation != "flowtrain"  # the one that was given stays as it was


def test_weights_take_the_precision_of_the_trainer(folder):
    torch.set_default_dtype(torch.bfloat16)  # as Lightning does while it builds a module for "bf16-true"
    try:
        for module in (built(folder), built()):
            assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
    finally:
        torch.set_default_dtype(torch.float32)


def test_frequencies_of_rotary_positions_stay_exact_in_bfloat16():
    module = built()
    before = {name: table.clone() for name, table in module.named_buffers()}
    module.to(dtype=torch.bfloat16)
    assert before
    for name, table in module.named_buffers():
        assert table.equal(before[name]), name


def test_tied_weights_stay_tied_where_their_half_is_absent():
    module = flow.models.QwenVLM(FAMILIES["qwen2_vl, tied"].config)
    module.set_local_roles(("encoder",))
    module.configure_model()
    text, head = module.model.model.language_model, module.model.lm_head
    assert head.weight.is_meta
    assert head.weight is text.embed_tokens.weight
    assert "model.lm_head.weight" not in dict(module.named_parameters())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "llava with siglip"])
def test_two_tables_of_tokens_in_a_folder_stay_two_though_its_config_says_one(tmp_path, family):
    kind, config = FAMILIES[family].kind, {**FAMILIES[family].config, "tie_word_embeddings": False}
    saved = kind(config)
    saved.configure_model()
    saved.model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": True}))
    loaded = kind(tmp_path)
    loaded.configure_model()
    again = kind(**loaded.hparams)  # as from a checkpoint, which keeps the config
    again.configure_model()
    again.load_state_dict(loaded.state_dict())
    for module in (loaded, again):
        assert module.model.lm_head.weight.equal(saved.model.lm_head.weight)
        assert module.model.get_input_embeddings().weight.equal(saved.model.get_input_embeddings().weight)


def test_a_folder_is_loaded_where_lightning_builds_modules_on_a_gpu(folder):
    with torch.device("cuda:0"):  # which transformers alone would take for a device_map
        module = built(folder)
    assert {weight.device.type for weight in module.parameters()} == {"cpu"}  # until the strategy moves them


def test_a_model_without_memory_is_built_from_the_config_of_its_folder(folder):
    module = copy_on_meta(flow.models.QwenVLM(folder))
    assert {weight.device.type for weight in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    module.to(torch.float32)
    assert {table.device.type for table in module.buffers()} == {"cpu"}


def test_adamw_is_fused_where_no_weight_lies_on_the_host(folder):
    for module, fused in ((copy_on_meta(flow.models.QwenVLM(folder)), True), (built(), None)):
        assert {group["fused"] for group in module.configure_optimizers().param_groups} == {fused}


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava with siglip"])
def test_a_profile_counts_the_work_of_both_halves(tmp_path, family):
    kind, config, images = FAMILIES[family].kind, FAMILIES[family].config, FAMILIES[family].images
    write_records(tmp_path, 16)
    data = tiny_data(tmp_path, images=images, global_batch_size=8, token_budget=512)
    settings = {"accelerator": "cpu", "seconds": 0.1, "reduction": False, "progress": False, "flops": True}
    profile = profile_module(kind(config), data, **settings)
    assert all(half.flops is not None for half in profile.roles.values())


@pytest.mark.parametrize("recompute", [False, "selective", True])
@pytest.mark.parametrize(
    ("family", "frozen", "block"),
    [
        ("llava with clip", "model.vision_tower", "model.vision_tower.encoder.layers.0.self_attn"),
        ("qwen2_5_vl", ["model.visual.blocks", "model.visual.patch_embed"], "model.visual.blocks.0.attn"),
    ],
)
def test_a_frozen_tower_runs_once_in_a_step(family, frozen, block, recompute):
    kind, config, images = FAMILIES[family].kind, FAMILIES[family].config, FAMILIES[family].images
    module = kind(config, frozen=frozen, recompute=recompute)
    module.configure_model()
    runs = []
    module.model.get_submodule(block).register_forward_pre_hook(lambda *_: runs.append(1))
    patches = torch.randn(16, images.patch_dim).numpy()
    features = module.encode(pack_media([LoadedMedia(patches, (4, 4), 16 // images.merge_size**2)]))
    projected = module.projected({"image": features})["image"]
    (projected[0] if isinstance(projected, tuple) else projected).sum().backward()
    assert len(runs) == 1


def test_what_is_recomputed_is_one_of_three_things():
    with pytest.raises(ValueError, match=r"recompute='full' was given\. Take True"):
        flow.models.QwenVLM(FAMILIES["qwen2_vl"].config, recompute="full")


def test_predictions_end_where_the_model_says_and_the_saved_folder_says_so_too(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "repetition_penalty": 1.05}))
    module = built(folder, max_new_tokens=5)
    assert (module.end_token, module.max_new_tokens) == ((7, 8), 5)
    again = flow.models.QwenVLM(**module.hparams)  # as from a checkpoint
    again.configure_model()
    again.model.save_pretrained(folder / "tuned")
    assert (again.end_token, again.max_new_tokens) == ((7, 8), 5)
    said = json.loads((folder / "tuned" / "generation_config.json").read_text())
    assert (said["eos_token_id"], said["repetition_penalty"]) == ([7, 8], 1.05)


def test_frozen_parts_do_not_train_and_vectors_do_not_decay():
    module = built(frozen=["model.visual.blocks", "lm_head"], lr=1e-3, weight_decay=0.1)
    matrices, vectors = module.configure_optimizers().param_groups
    trained = {id(weight) for group in (matrices, vectors) for weight in group["params"]}
    for name, weight in module.model.named_parameters():
        assert (id(weight) in trained) == (not name.startswith(("model.visual.blocks.", "lm_head."))), name
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {weight.ndim for weight in vectors["params"]} == {1}
    assert matrices["lr"] == 1e-3


@pytest.mark.parametrize(
    ("kind", "family", "words"),
    [
        (
            flow.models.QwenVLM,
            "llava with clip",
            "QwenVLM does not train models of type 'llava'.*LlavaVLM trains llava",
        ),
        (flow.models.HuggingFaceVLM, "qwen2_vl", "HuggingFaceVLM does not train .* QwenVLM trains qwen2_vl"),
        (
            flow.models.LlavaVLM,
            "qwen2_vl",
            "LlavaVLM does not train models of type 'qwen2_vl'.*QwenVLM trains qwen2_vl",
        ),
    ],
)
def test_another_family_is_refused_with_those_that_are_supported(kind, family, words):
    with pytest.raises(ValueError, match=words):
        kind(FAMILIES[family].config)


def test_a_tower_for_images_of_many_sizes_is_refused():
    config = {**FAMILIES["llava with clip"].config, "vision_config": {"model_type": "pixtral"}}
    with pytest.raises(ValueError, match=r"has a tower of type 'pixtral'; LlavaVLM trains those of CLIP"):
        flow.models.LlavaVLM(config)


def test_images_longer_than_the_window_of_local_layers_are_refused():
    config = {**FAMILIES["gemma3"].config, "mm_tokens_per_image": 25}
    with pytest.raises(ValueError, match=r"An image has 25 tokens .* but local layers see 24 \(sliding_window\)"):
        flow.models.GemmaVLM(config)


def test_a_frozen_part_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"frozen names 'visual', but Qwen2VL.* such as 'model.visual'"):
        built(frozen="visual")


def test_without_transformers_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"need transformers; install it with: pip install .*\[transformers\]"):
        flow.models.QwenVLM(QWEN)


def test_patches_of_another_size_are_refused():
    images = flow.ImageProcessor(patch_size=14)
    patches = torch.zeros(4, images.patch_dim).numpy()
    with pytest.raises(ValueError, match=r"have 588 numbers, but the tower takes patches of 4 x 4 pixels, 48 numbers"):
        built().encode(pack_media([LoadedMedia(patches, (2, 2), 1)]))


def test_decoders_that_see_ahead_are_refused_where_nothing_can_compare_them(monkeypatch):
    monkeypatch.setattr(own_forward, "takes_features", lambda model: False)

    class Gemma(flow.models.HuggingFaceVLM):
        families = ("gemma3",)

    config = transformers.Gemma3Config(
        text_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32},
        vision_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    )
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration the tokens of an image see each other"):
        Gemma(config).configure_model()


@pytest.mark.parametrize(
    ("family", "from_folder", "dtype"),
    [
        ("qwen2_5_vl", True, torch.bfloat16),
        ("qwen2_vl, tied", False, torch.float32),
        ("llava with siglip", True, torch.float32),
        ("smolvlm", False, torch.bfloat16),
    ],
)
def test_a_model_of_which_ranks_hold_parts_has_the_weights_of_one_process(tmp_path, family, from_folder, dtype):
    kind, source = FAMILIES[family].kind, FAMILIES[family].config
    if from_folder:
        saved = kind(source)
        saved.configure_model()
        saved.model.save_pretrained(tmp_path)
        source = tmp_path
    torch.set_default_dtype(dtype)
    try:
        expected, module = kind(source), kind(source)
        expected.configure_model()
        module.set_local_roles(("encoder", "backbone"), in_parts=("backbone",))
        module.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(parameter.is_meta for parameter in module.parameters())
    for role, weights in module.unfilled.items():
        fill_half(module, role, weights, torch.device("cpu"))
    assert module.state_dict().keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert module.state_dict()[name].equal(weight), name
    for (name, buffer), (_, other) in zip(module.named_buffers(), expected.named_buffers(), strict=True):
        assert buffer.equal(other), name


def test_a_folder_is_not_read_until_it_is_known_which_part_a_rank_holds(tmp_path):
    config = FAMILIES["qwen2_5_vl"].config
    saved = flow.models.QwenVLM({**config, "text_config": {**config["text_config"], "vocab_size": 500_000}})
    saved.configure_model()  # 128 MB
    saved.model.save_pretrained(tmp_path)
    del saved
    module = flow.models.QwenVLM(tmp_path)
    module.set_local_roles(("encoder", "backbone"), in_parts=("backbone",))
    before = _own_memory()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    assert _own_memory() - before < 16 << 20


def _own_memory() -> int:
    """Bytes that are resident and do not lie in a file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10
