"""Records of files of images and sound, a run on any layout of a module that sees and hears, and the plain loop."""

from __future__ import annotations

import json
import os
from math import gcd
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import soundfile
import torch
from PIL import Image
from scipy.signal import resample_poly

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.data import AudioProcessor, ChatTemplate, FlowDataModule
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.hearing import BINS, FRAMES_PER_ROW, Given, Sample, SeeingAndHearing, allocation_of
from tests.exactness.layouts import SEED, ranks_of
from tests.exactness.plain_hearing import loss_of
from tests.exactness.train import Recorder, gradients_of, weights_of
from tests.tiny import IMAGES, CharTokenizer

STEPS, GLOBAL_BATCH, RATE = 3, 4, 4000
AUDIO = AudioProcessor(sample_rate=RATE, frame_samples=BINS, frames_per_row=FRAMES_PER_ROW, max_seconds=0.1)
TEMPLATE = ChatTemplate(
    audio_token="<|vision_start|>", before_image="", after_image="", before_audio="", after_audio=""
)
_FILES = (("wav", RATE, 1), ("flac", 2 * RATE, 2), ("ogg", 2 * RATE, 1), ("wav", 11025, 2), ("mp3", 2 * RATE, 1))
"""Ending, rate and channels of each clip in turn."""
_KINDS = ("i", "ai", "a", "iaa", "", "ia", "a", "i", "aai", "i", "", "ia")
"""Of each record, its images and its clips of audio, in order."""


def write_files(folder: Path) -> Path:
    """Writes images, sound and the records that name them; returns the records' file."""
    draw, lines, clips = np.random.default_rng(3), [], 0
    for number, kinds in enumerate(_KINDS):
        parts: list[dict[str, Any]] = []
        for place, kind in enumerate(kinds):
            name = f"{number}-{place}"
            if kind == "i":
                high, wide = (int(side) for side in draw.integers(6, 30, 2))
                Image.fromarray(draw.integers(0, 255, (high, wide, 3), dtype=np.uint8)).save(folder / f"{name}.png")
                parts.append({"type": "image", "path": f"{name}.png"})
                continue
            ending, rate, channels = _FILES[clips % len(_FILES)]
            clips += 1
            samples = draw.uniform(-0.5, 0.5, (int(rate * draw.uniform(0.01, 0.05)), channels))
            soundfile.write(folder / f"{name}.{ending}", samples, rate)
            parts.append({"type": "audio", "path": f"{name}.{ending}"})
        words = "".join(draw.choice(list("abcdef"), 5))
        turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}]
        lines.append(json.dumps({"messages": [*turns, {"role": "assistant", "content": words}]}))
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines))
    return path


def train(folder: Path, *, layout: str, records: str) -> None:
    """Trains ``STEPS`` steps under ``"auto"`` or on a layout of the three halves; writes what every rank computed."""
    strategy: Any = layout
    if layout != "auto":
        strategy = FlowTrainStrategy(allocation=allocation_of(layout), hang_timeout=60)
    recorder = Recorder()
    L.seed_everything(SEED, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks_of(layout),
        strategy=strategy,
        precision="64-true",
        max_steps=STEPS,
        callbacks=[recorder],
        default_root_dir=folder,
        enable_model_summary=False,
        **quiet,
    )
    data = FlowDataModule(
        records,
        token_budget=160,
        global_batch_size=GLOBAL_BATCH,
        shuffle=False,
        tokenizer=CharTokenizer(),
        images=IMAGES,
        audio=AUDIO,
        template=TEMPLATE,
        seed=1,
    )
    trainer.fit(SeeingAndHearing(), data)
    recorder.save(folder)
    disconnect_groups()


def train_plainly(folder: Path, *, records: str) -> None:
    """The same steps, sample after sample, with sound read by soundfile and SciPy alone."""
    torch.set_default_dtype(torch.float64)
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    model = SeeingAndHearing()
    model.configure_model()
    optimizer, recorder = model.configure_optimizers(), Recorder()
    samples = [_sample(Path(records).parent, json.loads(line)) for line in Path(records).read_text().splitlines()]
    recorder.initial = weights_of(model)
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        pairs = [loss_of(model, sample) for sample in samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]]
        loss = torch.stack([summed for summed, _ in pairs]).sum() / sum(count for _, count in pairs)
        loss.backward()
        recorder.gradients.append(gradients_of(model))
        optimizer.step()
        recorder.losses.append(loss.item())
        recorder.weights.append(weights_of(model))
    recorder.save(folder)


def _sample(folder: Path, record: dict[str, Any]) -> Sample:
    asked, answered = record["messages"]
    tokens, media = {"image": TEMPLATE.image_token, "audio": TEMPLATE.audio_token}, []
    for part in asked["content"][:-1]:
        path = folder / part["path"]
        if part["type"] == "image":
            loaded = IMAGES.load_pixels(path, None)
            media.append(Given("image", pack_media([loaded]).patches.numpy(), loaded.grid))
        else:
            media.append(Given("audio", _frames(path), (1, 0)))
    said = "".join(tokens[part["type"]] for part in asked["content"][:-1])
    encode = CharTokenizer().encode
    ids = encode(f"<|im_start|>user\n{said}q<|im_end|>\n<|im_start|>assistant\n")
    answer, behind = encode(f"{answered['content']}<|im_end|>"), encode("\n")
    learned = [False] * len(ids) + [True] * len(answer) + [False] * len(behind)
    return Sample(np.asarray([*ids, *answer, *behind]), np.asarray(learned), tuple(media))


def _frames(path: Path) -> np.ndarray[Any, Any]:
    with soundfile.SoundFile(path) as sound:
        samples, rate = sound.read(dtype="float32", always_2d=True), sound.samplerate
    wave = samples.mean(axis=1)
    shared = gcd(rate, RATE)
    wave = resample_poly(wave, RATE // shared, rate // shared) if rate != RATE else wave
    return np.pad(wave, (0, -len(wave) % (BINS * FRAMES_PER_ROW))).reshape(-1, BINS).astype(np.float32)
