"""Loads what a sample consists of: its tokens, and the patches of its media."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.media.audio_processor import AudioProcessor
from flowtrain_lightning.data.media.image_processor import ImageProcessor
from flowtrain_lightning.data.media.loaded_media import LoadedMedia, OwnMedia
from flowtrain_lightning.data.media.media_content import content_name
from flowtrain_lightning.data.media.media_files import AudioFile, MediaError, VideoFile
from flowtrain_lightning.data.media.media_status import refuse_rewritten
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.records.conversation import Template, TokenSequence
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.records.sample_tokens import token_sequence
from flowtrain_lightning.data.records.tokenization import Tokenizer
from flowtrain_lightning.data.sources.measuring import unusable
from flowtrain_lightning.data.sources.sample_source import SampleSource
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.role_graph import GENERATED

if TYPE_CHECKING:
    from PIL.Image import Image

Augment = Callable[["Image", np.random.Generator], "Image"]
"""Changes an image by chance, taking all chance from the generator that it is given."""


@dataclass(frozen=True)
class SampleLoader:
    """Loads what a sample consists of.

    Attributes:
        source: the samples.
        tokenizer: makes ids of text.
        template: how a conversation is written.
        images: makes patches of images.
        prompt: sequences end with the header of the last assistant turn.
        limit: cut sequences to so many tokens.
        augment: changes images. Its chance depends on seed, epoch, sample and the image's number in it alone.
        seed: of augmentation.
        videos: makes patches of videos; None: there are none.
        audio: makes frames of audio; None: there is none.
    """

    source: SampleSource
    tokenizer: Tokenizer
    template: Template
    images: ImageProcessor
    prompt: bool = False
    limit: int | None = None
    augment: Augment | None = None
    seed: int = 0
    videos: VideoProcessor | None = None
    audio: AudioProcessor | None = None

    def sequence(self, record: Record, tokens: int, rows: IntArray) -> TokenSequence:
        """A sample's tokens and labels.

        Args:
            record: the sample's record.
            tokens: how many tokens the plan counts on.
            rows: ``[media items]`` rows of features of its media items.

        Raises:
            DataError: it has another number of tokens.
        """
        sequence = token_sequence(record, self.template, self.tokenizer, rows, prompt=self.prompt, videos=self.videos)
        if self.limit is not None:
            sequence = sequence.cut(self.limit)
        if len(sequence) != tokens:
            raise DataError(
                f"{record.where}: it has {len(sequence)} tokens, but had {tokens} when the file was indexed; "
                "the file was changed meanwhile. Start again to index it anew."
            )
        return sequence

    def media(
        self,
        record: Record,
        sample: int,
        number: int,
        rows: int,
        epoch: int,
        parts: tuple[int, int] | None = None,
    ) -> LoadedMedia:
        """One media item's patches.

        Args:
            record: the sample's record.
            sample: its number in the source.
            number: the media item's number in the record.
            rows: how many rows of features the plan counts on, unless it is to be generated.
            epoch: the epoch, for augmentation.
            parts: moments of a clip or tiles of a picture, from which to before which; None: all.

        Raises:
            DataError: the media item cannot be decoded, or is another one than was measured.
        """
        item = record.media[number]
        try:
            if isinstance(item, VideoFile):
                assert self.videos is not None, "who measures videos knows what becomes of them"
                loaded = self.videos.load(item, parts)
            elif isinstance(item, AudioFile):
                assert self.audio is not None, "who measures audio knows what becomes of it"
                loaded = self.audio.load(item)
            elif isinstance(item, OwnMedia):
                loaded = item.load()
            else:
                augment = self._augmentation(sample, number, epoch)
                loaded = self.images.load_pixels(item, augment, alone=len(record.media) == 1)
            if parts is not None and parts[1] <= loaded.parts and not isinstance(item, VideoFile):
                loaded = loaded.between(*parts)
        except MediaError as error:
            refuse_rewritten(item, number, record)
            raise unusable(item, record, error) from error
        refuse_rewritten(item, number, record)
        if number in record.generated:
            return loaded._replace(modality=GENERATED)
        if loaded.rows != rows:
            kind = loaded.modality if loaded.clip is None else "video"
            raise DataError(
                f"{record.where}: {kind} {item} gives {loaded.rows} rows of features, but gave {rows} when it was "
                "indexed; it was changed meanwhile. Delete the index in the cache folder and start again."
            )
        return loaded

    def content(self, record: Record, number: int) -> str:
        """A name of one media item's content, by which its features are kept.

        Args:
            record: the sample's record.
            number: the media item's number in the record.

        Raises:
            DataError: the media item cannot be read, or is another one than was measured.
        """
        item = record.media[number]
        refuse_rewritten(item, number, record)
        try:
            return content_name(item, alone=len(record.media) == 1)
        except MediaError as error:
            raise unusable(item, record, error) from error

    def where(self, sample: int) -> str:
        """The place of a sample, for messages; nothing is read to find it."""
        place = getattr(self.source, "where", None)
        return f"sample {sample}" if place is None else str(place(sample))

    def _augmentation(self, sample: int, number: int, epoch: int) -> Callable[[Image], Image] | None:
        if self.augment is None:
            return None
        return partial(_augmented, self.augment, np.random.default_rng([self.seed, epoch, sample, number]))


def _augmented(augment: Augment, generator: np.random.Generator, image: Image) -> Image:
    return augment(image, generator)
