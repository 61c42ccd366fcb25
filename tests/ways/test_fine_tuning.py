"""The way of somebody with a Qwen2.5-VL folder and JSON Lines of one's own, by recipes/qwen_vl/README.md alone."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.recipes.test_qwen_vl import folder
from tests.ways.pasting import commands, run

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PAGE = "recipes/qwen_vl/README.md"
HERE = (
    " --trainer.accelerator cpu --trainer.devices 2 --data.token_budget 512 --data.num_workers 0 --trainer.max_steps 2"
    " --trainer.val_check_interval 2 --trainer.limit_val_batches 1"
)
"""What somebody adds on a machine without GPUs, to see in two steps whether it works."""

__all__ = ["folder"]  # a fixture


@pytest.fixture
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the model's folder where the page downloads it to, and records of one's own."""
    place = tmp_path_factory.mktemp("clone")
    (place / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(folder, place / "models" / "qwen")
    for stage in ("train", "val"):
        shutil.copy(ROOT / f"recipes/quickstart/data/{stage}.jsonl", place)
    (place / "images").symlink_to(ROOT / "recipes/quickstart/data/images")
    return place


@pytest.mark.full
@pytest.mark.parametrize("heading", ["Fine-tune Qwen-VL", "Adapters instead of all weights"])
def test_the_commands_of_the_page_fine_tune_and_export(place, heading):
    typed = commands(PAGE, heading)
    if heading == "Fine-tune Qwen-VL":  # whose part ends where that of adapters begins
        typed = typed[: typed.index(commands(PAGE, "Adapters instead of all weights")[0])]
    for command in typed:
        match shlex.split(command):
            case ["pip", "install", *_]:
                run(place, f"cd {ROOT} && python -m {command} --dry-run --no-index --no-build-isolation")
            case ["hf", "download", *_]:
                assert "--local-dir models/qwen" in command
            case ["flowtrain", "fit", *_]:
                run(place, command + HERE)
            case ["flowtrain", "export", *_]:
                run(place, command)
            case _:
                raise AssertionError(f"nobody tries {command}")
    model = transformers.AutoModelForImageTextToText.from_pretrained(place / "models" / "qwen")
    tuned = place / typed[-1].split()[-1]
    if heading == "Fine-tune Qwen-VL":
        assert (
            transformers.AutoModelForImageTextToText.from_pretrained(tuned).num_parameters() == model.num_parameters()
        )
    else:
        assert peft.PeftModel.from_pretrained(model, tuned).peft_config
    (place / "usual").touch()
    (weights,) = tuned.glob("*.safetensors")
    assert weights.stat().st_mode == (place / "usual").stat().st_mode
