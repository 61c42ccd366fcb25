"""Audio as a Whisper extractor of a model's folder makes it: as many rows as its encoder makes of so many frames."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowtrain_lightning.data import LogMelProcessor
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.models.built_twin import built
from flowtrain_lightning.models.encoder_inputs import hears, sound_arguments
from flowtrain_lightning.models.family_traits import rows_of, whole_of
from flowtrain_lightning.models.published_config import audio_token_id, without_foreign_code
from flowtrain_lightning.models.twin import twin_config
from flowtrain_lightning.models.untrainable import UntrainableError, told_as

_LENGTHS_KEPT = 4096


@dataclass(frozen=True)
class AskedAudio(LogMelProcessor):
    """Clips as a model's own extractor makes them, without the silence that it adds. ``frames_per_row`` has no meaning.

    Attributes:
        count: frames of a clip -> rows of features.
    """

    count: Callable[[int], int] = field(default=int, repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """Changes whenever some clip would become something else."""
        rule = (self.sample_rate, self.frame_samples, self.window, self.mel_bins, self.max_seconds)
        return fingerprint([type(self).__name__, rule, [self.count(frames) for frames in (99, 100, 101, 200, 333)]])

    def frames(self, samples: int) -> int:
        """Frames that the encoder reads of a clip of so many samples."""
        return -(-samples // self.frame_samples)

    def rows_of_features(self, samples: int) -> int:
        """Rows of features of a clip of so many samples."""
        return self.count(self.frames(samples))

    def filled(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The samples and so much silence that no frame of theirs meets its end."""
        frames = self.frames(len(samples)) + -(-self.window // self.frame_samples)
        return np.pad(samples, (0, frames * self.frame_samples - len(samples)))

    def values(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """``[frames, mel_bins]`` logarithms of energies; see `LogMelProcessor`.

        Args:
            samples: ``[samples]`` at the rate of all.
        """
        return np.ascontiguousarray(super().values(samples)[: self.frames(len(samples))])


def asked_audio(extractor: Any, config: Any) -> AskedAudio:
    """Audio by the settings of an extractor of Hugging Face.

    Args:
        extractor: a ``WhisperFeatureExtractor``.
        config: of a model that hears.

    Raises:
        ValueError: it is another extractor, or adds noise.
    """
    kind, dither = type(extractor).__name__, getattr(extractor, "dither", 0.0)
    if kind != "WhisperFeatureExtractor" or dither:
        raise ValueError(
            f"The model's audio is made by {kind} with dither={dither}, which cannot be followed (only Whisper's "
            "without it). Say what becomes of audio: FlowDataModule(audio=...)."
        )

    whole = _small(config)

    @lru_cache(_LENGTHS_KEPT)
    @torch.no_grad()
    def count(frames: int) -> int:
        silence = torch.zeros(frames, extractor.feature_size, dtype=torch.float64)
        return len(rows_of(whole.get_audio_features(**sound_arguments(silence), return_dict=True))[0])

    return AskedAudio(
        sample_rate=extractor.sampling_rate,
        frame_samples=extractor.hop_length,
        max_seconds=float(extractor.chunk_length),
        window=extractor.n_fft,
        mel_bins=extractor.feature_size,
        count=count,
    )


def own_audio(model: str | Path, config: Any) -> AskedAudio | None:
    """Audio by the extractor of a model's folder; None of a model that does not hear.

    Raises:
        ValueError: it is code that comes with the model, or an extractor that cannot be followed.
    """
    if audio_token_id(config) is None:
        return None
    takes_clips = False
    with suppress(UntrainableError), told_as("No small model of this config can be built"):
        takes_clips = hears(_small(config))  # what cannot be built is told where it is to be trained
    return _of_folder(model, config) if takes_clips else None


def _small(config: Any) -> Any:
    return whole_of(built(twin_config(config)))


def _of_folder(model: str | Path, config: Any) -> AskedAudio:
    from transformers import AutoFeatureExtractor

    with without_foreign_code(model):
        return asked_audio(AutoFeatureExtractor.from_pretrained(model, trust_remote_code=False), config)
