"""The recipe for Qwen-VL trains a small model of that family from its YAML files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import ModelledCosts, RoleLayout
from flowtrain_lightning.checkpoint.index_file import read_index
from flowtrain_lightning.cli import main
from flowtrain_lightning.cli.plan_choice import choose_plans
from flowtrain_lightning.models import QwenVLM
from tests.allocator.problems import problems
from tests.forks import Job, run_jobs
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "tests" / "models" / "chat_templates" / "qwen2_5_vl.jinja"
DRAWINGS = ROOT / "recipes" / "quickstart"
SECONDS = 600  # the longest wait on a busy machine
PATCH = 8  # of the drawings, in pixels
FIT = ["--data.token_steps.microbatches", "4", "--data.token_budget", "512", "--data.num_workers", "0"]
FIT += ["--trainer.accelerator", "cpu", "--trainer.num_nodes", "1", "--trainer.max_steps", "2"]
FIT += ["--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """What `hf download` gives: weights, tokenizer, chat template, and how images are processed."""
    family = getattr(request, "param", "qwen2_5_vl")
    shutil.copy(TEMPLATE, tmp_path / "chat_template.jinja")
    shutil.copy(DRAWINGS / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.from_file(str(DRAWINGS / "tokenizer.json"))
    config = dict(FAMILIES[family].config)
    config["text_config"] = {**config["text_config"], "vocab_size": tokenizer.get_vocab_size()}
    window = {"window_size": 4 * PATCH} if "window_size" in config["vision_config"] else {}
    config["vision_config"] = {**config["vision_config"], "patch_size": PATCH, **window}
    for name, token in (("image", "image_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{token}|>")
    module = QwenVLM(config)
    module.configure_model()
    module.model.save_pretrained(tmp_path)
    pixels = {"min_pixels": 16 * 16, "max_pixels": 64 * 64}
    transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, **pixels).save_pretrained(tmp_path)
    return tmp_path


def fit_arguments(folder: Path, recipe: str, added: str | None, ranks: int) -> list[str]:
    """What a user types after ``flowtrain`` to train by YAML files of the recipe."""
    recipes = ROOT / "recipes" / "qwen_vl"
    text = (recipes / recipe).read_text(encoding="utf-8")
    assert text.count("models/qwen") == 2, "once where it says how to get it"
    config = folder / "run.yaml"
    config.write_text(text.replace("models/qwen", str(folder)).replace("max_pixels: 1003520", "max_pixels: 4096"))
    configs = ["--config", str(config), *(["--config", str(recipes / added)] if added else [])]
    data = [f"--data.{stage}={DRAWINGS}/data/{stage}.jsonl" for stage in ("train", "val")]
    folders = ["--data.index.cache_dir", str(folder / "index"), "--trainer.default_root_dir", str(folder / "runs")]
    folders += ["--trainer.callbacks.init_args.dirpath", str(folder / "runs" / "checkpoints")]
    return ["fit", *configs, *data, *folders, *FIT, "--trainer.devices", str(ranks)]


def expert_degree(recipe: str) -> int:
    """The ranks among which a recipe divides experts."""
    text = (ROOT / "recipes" / "qwen_vl" / recipe).read_text(encoding="utf-8")
    degree = yaml.safe_load(text)["trainer"]["strategy"]["init_args"]["roles"]["backbone"]["expert"]
    assert isinstance(degree, int)
    return degree


def fit_and_export(folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, added: str | None, ranks: int) -> Path:
    """Trains by YAML files of the recipe, and gives the folder that is exported for Hugging Face."""
    arguments = fit_arguments(folder, recipe, added, ranks)
    if ranks == 1:
        monkeypatch.setattr(sys, "argv", ["flowtrain", *arguments])
        main()
    else:
        job = Job("fit", "tests.recipes.commands:flowtrain", ranks, {"arguments": arguments}, deadline=SECONDS)
        run_jobs(folder, [job])["fit"].check()
    (last,) = (folder / "runs").rglob("last.ckpt")
    monkeypatch.setattr(sys, "argv", ["flowtrain", "export", "--format", "hf", str(last), str(folder / "tuned")])
    main()
    return folder / "tuned"


CASES = [
    pytest.param(None, 2, id="who encodes is planned", marks=pytest.mark.full),
    pytest.param("1-gpu.yaml", 1, id="both halves on one device"),
    pytest.param("8-gpus.yaml", 4, id="both halves in shards", marks=pytest.mark.full),
    pytest.param("64-gpus.yaml", 4, id="shards over all nodes", marks=pytest.mark.full),
]
"""What is added to the recipe's configuration, and on how many processes its layout is tried."""


@pytest.mark.parametrize(("added", "ranks"), CASES)
def test_the_recipe_trains_and_gives_a_folder_for_hugging_face(folder, monkeypatch, added, ranks):
    fit_and_export(folder, monkeypatch, "config.yaml", added, ranks)
    tuned = transformers.AutoModelForImageTextToText.from_pretrained(folder / "tuned").state_dict()
    before = transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    assert tuned.keys() == before.keys()
    changed = {name for name, weight in tuned.items() if not weight.equal(before[name])}
    assert any("visual" in name for name in changed), "the tower trains"
    assert any("language_model" in name for name in changed)
    reads, read = (flow.models.processor_of(place) for place in (folder / "tuned", folder))
    assert reads.template.fingerprint == read.template.fingerprint
    assert reads.images.fingerprint == read.images.fingerprint


@pytest.mark.full
@pytest.mark.parametrize("folder", ["qwen3_vl_moe"], indirect=True)
@pytest.mark.parametrize(("recipe", "ranks"), [("mixture-8-gpus.yaml", 4), ("mixture-64-gpus.yaml", 8)])
def test_the_recipe_for_a_mixture_trains_in_layouts_of_its_kinds(folder, monkeypatch, recipe, ranks):
    small = folder / "small.yaml"
    text = (ROOT / "recipes" / "qwen_vl" / recipe).read_text(encoding="utf-8")
    small.write_text(text.replace(f"expert: {expert_degree(recipe)}", "expert: 2"))
    tuned = fit_and_export(folder, monkeypatch, "config.yaml", str(small), ranks)
    found = transformers.AutoModelForImageTextToText.from_pretrained(tuned).state_dict()
    before = transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    assert found.keys() == before.keys()
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert not any(found[name].equal(before[name]) for name in experts)


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "devices"), [("mixture-8-gpus.yaml", 8), ("mixture-64-gpus.yaml", 64)])
def test_the_recipe_for_a_mixture_has_the_layouts_of_the_planner(recipe, devices):
    said = yaml.safe_load((ROOT / "recipes" / "qwen_vl" / recipe).read_text(encoding="utf-8"))
    strategy = said["trainer"]["strategy"]["init_args"]
    batches = {"microbatches": said["data"]["init_args"]["token_steps"]["microbatches"]}
    planned = choose_plans(ModelledCosts(problems("qwen3-vl-30b-a3b", devices, **batches))).recommended.chosen
    assert planned.allocation(8).placement == strategy["placement"]
    for role, candidate in planned.chosen.items():
        wanted = RoleLayout(**strategy["roles"][role])
        assert wanted.over(devices) == candidate.layout
        assert wanted.recompute == candidate.recompute


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "added", "ranks"),
    [
        pytest.param("config.yaml", "1-gpu.yaml", 1, id="one device"),
        pytest.param("config.yaml", "64-gpus.yaml", 4, id="shards over all nodes"),
        pytest.param("lora.yaml", None, 2, id="adapters"),
    ],
)
def test_the_same_command_started_again_goes_on(folder, recipe, added, ranks):
    command = [*fit_arguments(folder, recipe, added, ranks), "--ckpt_path", "last"]
    logs = []
    for steps in ("2", "4"):
        command[command.index("--trainer.max_steps") + 1] = steps
        job = Job(f"fit {steps}", "tests.recipes.commands:flowtrain", ranks, {"arguments": command}, deadline=SECONDS)
        logs.append(run_jobs(folder, [job])[job.name].check().log)
    assert "there is no checkpoint below" in logs[0]
    assert f'ckpt_path="last" is {folder}/runs/checkpoints/' in logs[1]
    assert ", saved after step 2 in epoch 0." in logs[1]
    assert max(read_index(path).lightning["global_step"] for path in (folder / "runs" / "checkpoints").iterdir()) == 4


@pytest.mark.full
def test_the_recipe_for_adapters_gives_a_folder_for_peft(folder, monkeypatch):
    adapters = fit_and_export(folder, monkeypatch, "lora.yaml", None, 2)
    before = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    weights = {name: weight.clone() for name, weight in before.state_dict().items()}
    tuned = peft.PeftModel.from_pretrained(before, adapters).merge_and_unload().state_dict()
    changed = {name for name, weight in tuned.items() if not weight.equal(weights[name])}
    assert changed
    assert all("language_model" in name and "_proj" in name for name in changed)
