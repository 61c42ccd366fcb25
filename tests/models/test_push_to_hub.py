"""What `flowtrain export --format hf` writes is whole: transformers opens it, and pushes all of it to the Hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import lightning as L
import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.cli import main
from tests.models.test_pretrained import data_of, published, records  # noqa: F401

transformers = pytest.importorskip("transformers")

from tests.models.processors import PUBLISHED  # noqa: E402

GENERATION = {"do_sample": True, "eos_token_id": [0, 7], "temperature": 0.25}
WHOLE = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""What a model of Hugging Face is."""


@pytest.fixture
def exported(tmp_path, records, monkeypatch):  # noqa: F811
    """A trained model's folder, written by the command, and the folder of the model that it was made of."""
    base = published(tmp_path / "base", "llava")
    PUBLISHED["llava"].make().save_pretrained(base)
    transformers.GenerationConfig(**GENERATION).save_pretrained(base)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy="flowtrain", accelerator="cpu", devices=1, max_steps=1, default_root_dir=tmp_path, **quiet
    )
    trainer.fit(flow.models.from_pretrained(base, lr=1e-3), data_of(records))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    command = ["flowtrain", "export", "--format", "hf", str(tmp_path / "last.ckpt"), str(tmp_path / "tuned")]
    monkeypatch.setattr(sys, "argv", command)
    main()
    return tmp_path / "tuned", base


@pytest.fixture
def hub(monkeypatch):
    """A Hub that keeps what is pushed: repository -> file -> content."""
    kept: dict[str, dict[str, bytes]] = {}

    def create_repo(_api, repo_id, **_settings):
        kept.setdefault(repo_id, {})
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(_api, repo_id, operations, **_settings):
        for operation in operations:
            with operation.as_file() as file:
                kept[repo_id][operation.path_in_repo] = file.read()

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # no README is there to be read
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    return kept


def test_the_exported_folder_is_pushed_whole_and_opens_again(exported, hub, tmp_path):
    tuned, base = exported
    assert {file.name for file in tuned.iterdir()} >= WHOLE
    transformers.AutoModelForImageTextToText.from_pretrained(tuned).push_to_hub("somebody/tuned")
    assert hub["somebody/tuned"].keys() >= {"config.json", "generation_config.json", "model.safetensors"}
    transformers.AutoProcessor.from_pretrained(tuned).push_to_hub("somebody/tuned")
    assert hub["somebody/tuned"].keys() >= WHOLE
    again = tmp_path / "again"
    again.mkdir()
    for name, content in hub["somebody/tuned"].items():
        (again / name).write_bytes(content)
    assert_the_same(again, tuned)
    assert (again / "chat_template.jinja").read_text() == (base / "chat_template.jinja").read_text()
    generation = json.loads((again / "generation_config.json").read_text())
    assert {name: generation[name] for name in GENERATION} == GENERATION


def assert_the_same(folder: Path, other: Path) -> None:
    """Whether two folders hold the same weights and read and write the same."""
    kinds = (transformers.AutoModelForImageTextToText, transformers.AutoTokenizer)
    (model, tokenizer), (as_model, as_tokenizer) = (
        [kind.from_pretrained(each) for kind in kinds] for each in (folder, other)
    )
    for name, weight in as_model.state_dict().items():
        assert weight.equal(model.state_dict()[name]), name
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    written, expected = (one.apply_chat_template(turns, tokenize=False) for one in (tokenizer, as_tokenizer))
    assert written == expected
    found, wanted = (flow.models.from_pretrained(each) for each in (folder, other))
    assert found.template.fingerprint == wanted.template.fingerprint
    assert found.images.fingerprint == wanted.images.fingerprint
