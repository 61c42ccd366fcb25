"""The recipe of a model that sees and hears: what it makes, and that what it says of tones comes from the tones."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowtrain_lightning.data.media.media_files import AudioFile
from recipes.omni.module import AUDIO
from recipes.omni.run import CHANCE, train
from recipes.omni.scenes import COLOURS, PITCHES, tokenizer, with_other_tones, write_scenes
from tests.paths import ROOT


def test_every_word_of_the_data_is_a_token(tmp_path: Path) -> None:
    records = [json.loads(line) for line in write_scenes(tmp_path, 8, seed=0).read_text().splitlines()]
    words = tokenizer()
    for record in records:
        colour, pitch = record["messages"][1]["content"].split()
        assert colour in COLOURS
        assert pitch in PITCHES
        assert 0 not in words.encode(f"<|im_start|>user\n{colour} {pitch}<|im_end|>").ids


def test_a_pitch_is_the_loudest_band_of_its_clip(tmp_path: Path) -> None:
    loudest = {pitch: set() for pitch in PITCHES}
    for line in write_scenes(tmp_path, 40, seed=1).read_text().splitlines():
        asked, answered = json.loads(line)["messages"]
        frames = AUDIO.load(AudioFile(tmp_path / asked["content"][1]["path"])).pixels
        loudest[answered["content"].split()[1]].add(int(frames.mean(axis=0).argmax()))
    bands = [found for found in loudest.values() if found]
    assert all(max(lower) < min(higher) for lower, higher in itertools.pairwise(bands))


def test_swapped_tones_are_the_same_tones_in_other_records(tmp_path: Path) -> None:
    own = write_scenes(tmp_path, 20, seed=2)
    tones = [
        [json.loads(line)["messages"][0]["content"][1]["path"] for line in path.read_text().splitlines()]
        for path in (own, with_other_tones(own, seed=3))
    ]
    assert sorted(tones[0]) == sorted(tones[1])
    assert np.mean([one == other for one, other in zip(*tones, strict=True)]) < 0.3


@pytest.mark.full
def test_it_hears(tmp_path: Path) -> None:
    heard = train(tmp_path, records=1500, held_out=128, steps=250, devices=1)
    assert heard.own >= 0.9
    assert heard.others <= 2 * CHANCE


@pytest.mark.full
def test_so_does_it_in_two_processes() -> None:
    command = [sys.executable, "-m", "recipes.omni.run", "--devices", "2", "--steps", "250"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True).stdout
    own, others = re.findall(r"(\d+)%", told)[:2]
    assert int(own) >= 90
    assert int(others) <= 200 * CHANCE
