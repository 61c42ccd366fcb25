"""A data module's tokenizer, template and processors: those given, else those of the model that is trained."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lightning as L

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.media.audio_processor import AudioProcessor
from flowtrain_lightning.data.media.image_processor import ImageProcessor
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.records.conversation import ChatTemplate, Template
from flowtrain_lightning.data.records.tokenization import Tokenizer, open_tokenizer


class ReadAs(L.LightningDataModule):
    """A LightningDataModule that reads words and media as its model does, where nothing else is said.

    Args:
        tokenizer: see `FlowDataModule`, as the others; None takes the model's.
        images: what becomes of images.
        videos: what becomes of videos.
        audio: what becomes of audio.
        template: how conversations are written.
    """

    def __init__(
        self,
        tokenizer: Any,
        images: ImageProcessor | None,
        videos: VideoProcessor | None,
        audio: AudioProcessor | None,
        template: Template | None,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._images = images
        self._videos = videos
        self._audio = audio
        self._template = template
        self._reader: L.LightningModule | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; opened when first asked for, so that ``prepare_data`` of a subclass may make it.

        Raises:
            DataError: none was given, and the model that is trained names none.
        """
        given = self._of_model("tokenizer") if self._tokenizer is None else self._tokenizer
        if given is None:
            raise DataError(
                "FlowDataModule has no tokenizer. Give one, FlowDataModule(tokenizer='tokenizer.json'), or train a "
                "model of Hugging Face by its name, which names its own."
            )
        return open_tokenizer(given)

    @property
    def images(self) -> ImageProcessor:
        """The processor of images."""
        return self._images or self._of_model("images") or ImageProcessor()

    @property
    def videos(self) -> VideoProcessor | None:
        """The processor of videos; None where records may have none."""
        found: VideoProcessor | None = self._videos or self._of_model("videos")
        return found

    @property
    def audio(self) -> AudioProcessor | None:
        """The processor of audio; None where records may have none."""
        found: AudioProcessor | None = self._audio or self._of_model("audio")
        return found

    @property
    def template(self) -> Template:
        """The template of conversations."""
        return self._template or self._of_model("template") or ChatTemplate()

    def read_as(self, module: L.LightningModule) -> None:
        """Take what is read by from this model, where it was not given and no Trainer says which model it is."""
        self._reader = module

    @property
    def read_by(self) -> L.LightningModule | None:
        """The model that is trained, or else the one that `read_as` named; None before either is known."""
        return self._reader if self.trainer is None else self.trainer.lightning_module

    @property
    def condition_rows(self) -> int | None:
        """Places of an image to be generated among the tokens; None where the model that is trained generates none."""
        graph: Any = getattr(self.read_by, "role_graph", None)
        return getattr(self.read_by, "condition_rows", None) if graph is not None and graph.behind else None

    def _of_model(self, name: str) -> Any:
        """The attribute ``processor`` of the model that is trained; None where it has none."""
        return getattr(getattr(self.read_by, "processor", None), name, None)
