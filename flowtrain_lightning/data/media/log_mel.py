"""Audio as log-mel frames: the energies of a clip in bands of the mel scale, as Whisper hears."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from flowtrain_lightning.data.media.audio_processor import AudioProcessor

_LEAST_ENERGY = 1e-10
_RANGE = 8.0
"""Powers of ten below a clip's loudest band; quieter ones count as these."""

_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
_LOGARITHMIC_STEP = np.log(6.4) / 27.0
"""Slaney's scale: linear up to 1000 Hz, that is 15 mels, and 27 mels from there to 6.4 times that."""


@dataclass(frozen=True)
class LogMelProcessor(AudioProcessor):
    """Clips of audio as log-mel frames, by Whisper's rule: equal to its feature extractor for the same samples.

    Attributes:
        sample_rate: see `AudioProcessor`.
        frame_samples: samples from one frame to the next.
        frames_per_row: see `AudioProcessor`.
        max_seconds: see `AudioProcessor`.
        window: samples that a frame looks at, with the frame's first in the middle.
        mel_bins: bands of a frame.
    """

    frame_samples: int = 160
    frames_per_row: int = 8
    window: int = 400
    mel_bins: int = 80

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.window <= 2 * self.frame_samples * self.frames_per_row:
            raise ValueError(
                f"{type(self).__name__} got window={self.window}; 2 <= window <= 2 * frame_samples * frames_per_row = "
                f"{2 * self.frame_samples * self.frames_per_row} must hold."
            )

    @cached_property
    def filters(self) -> NDArray[np.float32]:
        """``[window // 2 + 1, mel_bins]`` how much each frequency counts in each band."""
        edges = _hertz(np.linspace(0.0, _mels(self.sample_rate / 2), self.mel_bins + 2))
        frequencies = np.linspace(0.0, self.sample_rate / 2, self.window // 2 + 1)
        away = edges[None] - frequencies[:, None]
        widths = np.diff(edges)
        rising, falling = -away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:]
        triangles = np.maximum(0.0, np.minimum(rising, falling))
        return (triangles * 2.0 / (edges[2:] - edges[:-2])).astype(np.float32)

    def values(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """``[frames, mel_bins]`` logarithms of energies, about between -1 and 1.

        Args:
            samples: ``[samples]`` at the rate of all.
        """
        wave = torch.from_numpy(self.filled(samples))
        shape = torch.hann_window(self.window, dtype=torch.float32)  # whatever a run in float64 makes usual
        found = torch.stft(wave, self.window, self.frame_samples, window=shape, return_complex=True)[..., :-1]
        energies = found.abs().square().T @ torch.from_numpy(self.filters)
        powers = energies.clamp(min=_LEAST_ENERGY).log10()
        return ((powers.clamp(min=powers.max() - _RANGE) + 4.0) / 4.0).numpy()


def _mels(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz * _LINEAR_MELS / _LINEAR_HZ
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HZ) / _LOGARITHMIC_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    logarithmic = _LINEAR_HZ * np.exp(_LOGARITHMIC_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _LINEAR_HZ / _LINEAR_MELS, logarithmic)
