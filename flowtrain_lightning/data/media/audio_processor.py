"""Audio: samples of one rate as frames, and the rows of features that become of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.audio_files import decode_samples, read_audio_header
from flowtrain_lightning.data.media.audio_header import AudioError, AudioHeader
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.data.media.media_files import AudioFile
from flowtrain_lightning.packing import AUDIO
from flowtrain_lightning.packing.setting_values import check_settings


@dataclass(frozen=True)
class AudioProcessor:
    """Clips of audio as frames of their samples, for an encoder that takes waves.

    All clips are mixed down to one channel and brought to one rate. Silence fills a clip's last row of features. What a
    frame holds may be changed by a subclass, as `LogMelProcessor` does.

    Attributes:
        sample_rate: samples a second that every clip is brought to.
        frame_samples: samples of a frame; frames follow each other without a gap.
        frames_per_row: frames that become one row of features, that is a token of the backbone.
        max_seconds: longer clips are refused.
    """

    sample_rate: int = 16_000
    frame_samples: int = 320
    frames_per_row: int = 4
    max_seconds: float = 30.0

    def __post_init__(self) -> None:
        counts = ("sample_rate", "frame_samples", "frames_per_row")
        check_settings(self, least=dict.fromkeys(counts, 1), above={"max_seconds": 0})

    @property
    def fingerprint(self) -> str:
        """Changes whenever some clip would become something else."""
        return fingerprint([type(self).__name__, asdict(self)])

    def samples(self, header: AudioHeader) -> int:
        """Samples of a clip once it has the rate of all.

        Raises:
            AudioError: the clip is too long.
        """
        seconds = header.samples / header.rate
        if seconds > self.max_seconds:
            raise AudioError(
                f"it lasts {seconds:.1f} s, longer than max_seconds={self.max_seconds:g} of {type(self).__name__}; cut "
                "it into pieces, or raise that"
            )
        return -(-header.samples * self.sample_rate // header.rate)

    def frames(self, samples: int) -> int:
        """Frames that the encoder reads of a clip of so many samples."""
        return self.rows_of_features(samples) * self.frames_per_row

    def rows_of_features(self, samples: int) -> int:
        """Rows of features, that is backbone tokens, of a clip of so many samples."""
        return -(-samples // (self.frame_samples * self.frames_per_row))

    def values(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """``[frames, frame_dim]`` what the encoder reads of a clip.

        Args:
            samples: ``[samples]`` at the rate of all.
        """
        return self.filled(samples).reshape(-1, self.frame_samples)

    def filled(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """``[frames * frame_samples]`` the samples, and silence behind them."""
        return np.pad(samples, (0, self.frames(len(samples)) * self.frame_samples - len(samples)))

    def load(self, audio: AudioFile) -> LoadedMedia:
        """The frames of a clip.

        Raises:
            AudioError: it cannot be decoded, or is too long.
        """
        header = read_audio_header(audio)
        count = self.samples(header)
        values = self.values(resampled(decode_samples(audio), header.rate, self.sample_rate)[:count])
        size = header.samples, header.rate
        return LoadedMedia(values, (1, len(values)), self.rows_of_features(count), size=size, modality=AUDIO)


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """``[ceil(samples * wanted / rate)]`` the same clip at another rate.

    Args:
        samples: ``[samples]`` of the clip.
        rate: samples a second that it has.
        wanted: samples a second that it gets.
    """
    if rate == wanted:
        return samples
    shared = math.gcd(rate, wanted)
    found: NDArray[np.float32] = resample_poly(samples, wanted // shared, rate // shared).astype(np.float32)
    return found
