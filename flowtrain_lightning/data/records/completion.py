"""A prompt and its completion, both plain text without turns, as TRL takes them: the completion alone is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.records.tokenization import Tokenizer
from flowtrain_lightning.data.records.written_parts import Part, parts_encoder
from flowtrain_lightning.packing import IntArray

COMPLETED = ("prompt", "completion")
"""Under which a record holds the two."""


@dataclass(frozen=True)
class Completion:
    """Text that is given, and text that is learned behind it.

    Attributes:
        prompt: what is given.
        text: what is learned; the tokenizer's ``end`` is put behind it, unless it stands there.
    """

    prompt: str
    text: str

    def tokens(
        self, tokenizer: Tokenizer, media: Mapping[str, int], *, prompt: bool
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        """``[tokens]`` ids of both as one text, and which are learned: those from where the prompt's own ids end.

        Where a token spans the border, so that the prompt alone has other ids, it is learned. Special tokens that the
        two spell are plain text, but for the one that ends the completion.

        Args:
            tokenizer: makes ids of text.
            media: the tokens that stand for media items, and their ids.
            prompt: the ids of the prompt alone, to be continued.

        Raises:
            ForgedTokenError: the tokenizer cannot be kept from reading special tokens out of the text.
        """
        end = getattr(tokenizer, "end", None) or ""
        encoder = parts_encoder(tokenizer, (end,), media)
        before, said = Part(self.prompt), Part(self.text.removesuffix(end))
        given = encoder.encode([before], whole=True)
        ids = given if prompt else encoder.encode([before, said, Part(end, own=True)], whole=True)
        if not prompt and not end:
            ids = [*ids, *encoder.behind]  # which ends it as well
        same = next((at for at, pair in enumerate(zip(given, ids, strict=False)) if pair[0] != pair[1]), len(given))
        return np.asarray(ids, dtype=np.int64), np.arange(len(ids)) >= same
