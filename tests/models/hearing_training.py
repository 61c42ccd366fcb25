"""Small omni models on files of images and sound, on any layout, as ranks of a job run them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import soundfile
from PIL import Image
from transformers import WhisperFeatureExtractor

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.data import ChatTemplate, FlowDataModule
from flowtrain_lightning.models import AnyVLM, read_config
from flowtrain_lightning.models.asked_audio import AskedAudio, asked_audio
from flowtrain_lightning.models.published_config import usual_config
from flowtrain_lightning.models.twin import twin_config
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.hearing import allocation_of
from tests.exactness.layouts import SEED, ranks_of
from tests.exactness.train import Recorder
from tests.models.without_a_class import family_of
from tests.tiny import CharTokenizer

THINKERS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
STEPS, GLOBAL_BATCH = 2, 4
_KINDS = ("ia", "a", "", "i", "aia", "ii", "a", "")
"""Of each record, its images and its clips of audio, in order."""


class Hearing(CharTokenizer):
    """The same characters, with tokens for audio."""

    specials = (*CharTokenizer.specials, "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")


@cache
def config_of(name: str) -> dict[str, Any]:
    """The config of a thinker's twin, with the tokens of `Hearing`."""
    found: dict[str, Any] = twin_config(usual_config(name)).to_dict()
    ids = {"image": 3, "vision_start": 4, "vision_end": 5, "audio": 6, "audio_start": 7, "audio_end": 8, "video": 9}
    for kind, token in ids.items():
        found |= {key: token for key in (f"{kind}_token_id", f"{kind}_token_index") if key in found}
    found["text_config"] |= {"bos_token_id": None, "eos_token_id": 0}
    return found


def audio_of(name: str) -> AskedAudio:
    """Audio as a published model's feature extractor makes it."""
    return asked_audio(WhisperFeatureExtractor(feature_size=128), read_config(config_of(name)))


def write_files(folder: Path) -> Path:
    """Writes images, sound and the records that name them; returns the records' file."""
    draw, lines = np.random.default_rng(3), []
    for number, kinds in enumerate(_KINDS):
        parts: list[dict[str, Any]] = []
        for place, kind in enumerate(kinds):
            name = f"{number}-{place}"
            if kind == "i":
                pixels = draw.integers(0, 255, (40, 60, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}.png")
                parts.append({"type": "image", "path": f"{name}.png"})
                continue
            samples = draw.uniform(-0.5, 0.5, (int(16_000 * draw.uniform(0.3, 1.4)), 1))
            soundfile.write(folder / f"{name}.wav", samples, 16_000)
            parts.append({"type": "audio", "path": f"{name}.wav"})
        turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
        lines.append(json.dumps({"messages": [*turns, {"role": "assistant", "content": "that"}]}))
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines))
    return path


def train(folder: Path, *, family: str, layout: str, records: str) -> None:
    """Trains ``STEPS`` steps under ``"auto"`` or on a layout of its halves; every rank writes what it computed."""
    strategy: Any = layout
    if layout != "auto":
        strategy = FlowTrainStrategy(allocation=allocation_of(layout), hang_timeout=120)
    recorder = Recorder()
    L.seed_everything(SEED, verbose=False)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks_of(layout),
        strategy=strategy,
        precision="64-true",
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[recorder],
        default_root_dir=folder,
        enable_model_summary=False,
        **quiet,
    )
    data = FlowDataModule(
        records,
        token_budget=256,
        global_batch_size=GLOBAL_BATCH,
        shuffle=False,
        tokenizer=Hearing(),
        template=ChatTemplate(),
        images=family_of(family).images,
        audio=audio_of(family),
        seed=1,
    )
    trainer.fit(AnyVLM(config_of(family), lr=1e-3), data)
    recorder.save(folder)
    disconnect_groups()
