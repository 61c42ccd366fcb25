"""Omni models hear: their thinkers are certified with clips of audio, and train on separate ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("transformers")

from transformers import WhisperFeatureExtractor

from flowtrain_lightning.models import AnyVLM, certify
from flowtrain_lightning.models.published_config import usual_config
from tests.exactness.compare import Run, error, read_run, without_key_biases
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.hearing_training import THINKERS, audio_of, config_of, write_files

EITHER = [THINKERS[0], pytest.param(THINKERS[1], marks=pytest.mark.full)]


@pytest.mark.parametrize("family", EITHER)
def test_a_thinker_trains_as_hugging_faces_whole_model_on_pictures_and_clips(family: str):
    found = certify(usual_config(family), AnyVLM)
    assert (found.verdict, found.reason) == ("exact", "")
    assert found.leak is not None
    assert found.leak <= 1e-12


def test_audio_models_whose_forward_takes_no_features_are_refused():
    assert "qwen2_audio is refused" in certify(usual_config("qwen2_audio"), AnyVLM).sentence


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Run]:
    folder = tmp_path_factory.mktemp("thinkers")
    records = str(write_files(folder))

    @cache
    def trained(family: str, layout: str) -> Run:
        arguments = {"family": family, "layout": layout, "records": records}
        job = Job(f"{family} {layout}", "tests.models.hearing_training:train", ranks_of(layout), arguments)
        return read_run(run_jobs(folder, [job])[job.name].check().folder)

    return trained


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1+1+1", "colocated 2"])
@pytest.mark.parametrize("family", THINKERS)
def test_a_thinker_trains_on_ranks_as_in_one_process(trained: Callable[[str, str], Run], family: str, layout: str):
    found, expected = trained(family, layout), trained(family, "auto")
    assert error(found.initial, expected.initial) == 0.0
    assert error(found.gradients[0], expected.gradients[0]) <= 1e-12
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    pair = [replace(run, weights=[without_key_biases(run.weights[0])]) for run in (found, expected)]
    assert error(pair[0].weights[0], pair[1].weights[0]) <= 1e-7
    heard = [value for name, value in expected.gradients[0].items() if "audio_tower" in name and value is not None]
    assert any(value.abs().max() > 0 for value in heard)


@pytest.mark.parametrize("samples", [1600, 16_001, 23_456])
def test_frames_are_those_of_the_models_own_extractor_and_rows_those_of_its_encoder(samples: int):
    audio = audio_of(THINKERS[0])
    clip = np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=128)
    theirs = extractor(clip, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    frames = int(theirs["attention_mask"].sum())
    assert audio.frames(samples) == frames
    np.testing.assert_allclose(audio.values(clip), theirs["input_features"][0].T[:frames], atol=1e-6)
    assert audio.rows_of_features(samples) == ((frames - 1) // 2 + 1 - 2) // 2 + 1  # as its processor writes them


def test_a_twin_has_tokens_for_both_kinds_of_media():
    config = config_of(THINKERS[0])
    assert {config["image_token_index"], config["audio_token_index"], config["vision_start_token_id"]} == {3, 6, 4}
