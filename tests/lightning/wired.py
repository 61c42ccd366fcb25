"""Data that a YAML file can name."""

from __future__ import annotations

from pathlib import Path

from flowtrain_lightning import FlowDataModule
from tests.tiny import IMAGES, CharTokenizer


class TinyData(FlowDataModule):
    """The tiny data of a folder.

    Args:
        folder: holds ``train.jsonl`` and ``val.jsonl``.
        token_budget: the most tokens of a microbatch.
    """

    def __init__(self, folder: str, token_budget: int = 160) -> None:
        root = Path(folder)
        super().__init__(
            root / "train.jsonl",
            root / "val.jsonl",
            tokenizer=CharTokenizer(),
            token_budget=token_budget,
            global_batch_size=8,
            images=IMAGES,
            seed=1,
        )
