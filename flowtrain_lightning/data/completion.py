"""A prompt and its completion, both plain text without turns, as TRL takes them: the completion alone is learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.tokenization import Tokenizer
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

    def tokens(self, tokenizer: Tokenizer, *, prompt: bool) -> tuple[IntArray, NDArray[np.bool_]]:
        """``[tokens]`` ids of both as one text, and which are learned: those from where the prompt's own ids end.

        Where a token spans the border, so that the prompt alone has other ids, it is learned.

        Args:
            tokenizer: makes ids of text.
            prompt: the ids of the prompt alone, to be continued.
        """
        encode, end = getattr(tokenizer, "encode_whole", tokenizer.encode), getattr(tokenizer, "end", None) or ""
        given = encode(self.prompt)
        ids = given if prompt else encode(self.prompt + self.text + ("" if self.text.endswith(end) else end))
        same = next((at for at, pair in enumerate(zip(given, ids, strict=False)) if pair[0] != pair[1]), len(given))
        return np.asarray(ids, dtype=np.int64), np.arange(len(ids)) >= same
