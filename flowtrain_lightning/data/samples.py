"""Loading single samples: the sequence of one, the pixels of its pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flowtrain_lightning.data.collate import LoadedPicture
from flowtrain_lightning.data.conversation import ChatTemplate, TokenSequence
from flowtrain_lightning.data.images import ImageProcessor, PictureError
from flowtrain_lightning.data.metadata import MetadataSource
from flowtrain_lightning.data.records import DataError, Record
from flowtrain_lightning.data.tokenizer import Tokenizer
from flowtrain_lightning.packing import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

Augment = Callable[["Image", np.random.Generator], "Image"]
"""Changes a picture by chance, taking all chance from the generator it is given."""


@dataclass(frozen=True)
class SampleLoader:
    """Loads what a sample consists of.

    Attributes:
        source: the samples.
        tokenizer: makes ids of text.
        template: how a conversation is written.
        images: makes patches of pictures.
        prompt: sequences end with the header of the last assistant turn.
        limit: cut sequences to so many tokens.
        augment: changes pictures. Its chance depends on seed, epoch, sample and the picture's number in it alone.
        seed: of augmentation.
    """

    source: MetadataSource
    tokenizer: Tokenizer
    template: ChatTemplate
    images: ImageProcessor
    prompt: bool = False
    limit: int | None = None
    augment: Augment | None = None
    seed: int = 0

    def sequence(self, sample: int, tokens: int, rows: IntArray) -> TokenSequence:
        """A sample's tokens and labels.

        Args:
            sample: its number in the source.
            tokens: how many tokens the plan counts on.
            rows: ``[media]`` rows of features of its media.

        Raises:
            DataError: the record cannot be read, or has another number of tokens.
        """
        record = self.source.record(sample)
        sequence = self.template.sequence(record, self.tokenizer, rows, prompt=self.prompt)
        if self.limit is not None:
            sequence = sequence.cut(self.limit)
        if len(sequence) != tokens:
            raise DataError(
                f"{record.where}: it has {len(sequence)} tokens, but had {tokens} when the file was indexed; "
                "the file was changed meanwhile. Start again to index it anew."
            )
        return sequence

    def picture(self, record: Record, sample: int, number: int, rows: int, epoch: int) -> LoadedPicture:
        """One picture's patches.

        Args:
            record: the sample's record.
            sample: its number in the source.
            number: the picture's number in the record.
            rows: how many rows of features the plan counts on.
            epoch: the epoch, for augmentation.

        Raises:
            DataError: the picture cannot be decoded, or has another size.
        """
        path = record.pictures[number]
        augment = None
        if self.augment is not None:
            generator = np.random.default_rng([self.seed, epoch, sample, number])
            augment = partial(_augmented, self.augment, generator)
        try:
            patches, grid = self.images.load(path, augment)
        except PictureError as error:
            raise DataError(
                f"{record.where}: picture {path} cannot be used: {error}; correct the record, or leave such records "
                "out with unreadable='drop'."
            ) from error
        found = self.images.rows_of_features(*grid)
        if found != rows:
            raise DataError(
                f"{record.where}: picture {path} gives {found} rows of features, but gave {rows} when it was indexed; "
                "it was changed meanwhile. Delete the index in the cache folder and start again."
            )
        return LoadedPicture(patches, grid, rows)


def _augmented(augment: Augment, generator: np.random.Generator, picture: Image) -> Image:
    return augment(picture, generator)
