"""The tokenizer, chat template, images and videos with which a module of Hugging Face was published."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from flowtrain_lightning.data import AudioProcessor, ImageProcessor, Tokenizer, VideoProcessor
from flowtrain_lightning.models.processor import Processor
from flowtrain_lightning.models.processor_template import ProcessorTemplate
from flowtrain_lightning.models.projector import ProjectingModule


class ReadingModule(ProjectingModule):
    """A module whose ``hparams`` name the folder of a processor; `FlowDataModule` takes from it what it was not given.

    Properties below raise a ValueError where the module was built from a config alone and names no processor.

    Attributes:
        reads_as: ``model_type`` of the family whose words and pixels the models of the class have; empty: their own.
    """

    reads_as: ClassVar[str] = ""

    @cached_property
    def processor(self) -> Processor | None:
        """All that the model reads, for the data module; None of a model without name."""
        source = self.hparams["processor"]
        bounds = self.hparams["min_pixels"], self.hparams["max_pixels"]
        return source and Processor(source, *bounds, family=self.reads_as)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self._known_processor.tokenizer

    @cached_property
    def template(self) -> ProcessorTemplate:
        """The template of the model's conversations."""
        return self._known_processor.template

    @cached_property
    def images(self) -> ImageProcessor:
        """The processor of the model's images."""
        return self._known_processor.images

    @cached_property
    def videos(self) -> VideoProcessor | None:
        """The processor of the model's videos; None of a model that takes none."""
        return self._known_processor.videos

    @cached_property
    def audio(self) -> AudioProcessor | None:
        """The processor of audio; None of a model that does not hear."""
        return self._known_processor.audio

    @property
    def _known_processor(self) -> Processor:
        if self.processor is None:
            raise ValueError(
                f"This {type(self).__name__} was built from a config, which names no tokenizer, template and images. "
                f"Give {type(self).__name__}(..., processor=FOLDER) the name or folder of a model that reads alike."
            )
        return self.processor
