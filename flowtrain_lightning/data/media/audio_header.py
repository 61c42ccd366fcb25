"""The header of a clip of audio, and the error of one that cannot be used."""

from __future__ import annotations

from typing import NamedTuple

from flowtrain_lightning.data.media.media_files import MediaError


class AudioError(MediaError):
    """A clip of audio that cannot be used; the message says why, without naming the record."""


class AudioHeader(NamedTuple):
    """The header of a clip of audio.

    Attributes:
        samples: how many there are of each channel.
        rate: samples a second.
    """

    samples: int
    rate: int
