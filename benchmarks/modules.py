"""The modules and the data of the benchmarks that train: balances of encoder and backbone, and pictures with text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain_lightning.data import FlowDataModule, ImageProcessor, IndexConfig
from recipes.quickstart.module import QuickstartVLM

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "recipes/quickstart/tokenizer.json"
IMAGES = ImageProcessor(patch_size=14, merge_size=2, min_pixels=112 * 112, max_pixels=160 * 160)
SEED = 1

MODULES: dict[str, dict[str, int]] = {
    "1:4": {"encoder_width": 128, "encoder_depth": 3, "backbone_width": 256, "backbone_depth": 4},
    "1:2": {"encoder_width": 160, "encoder_depth": 4, "backbone_width": 224, "backbone_depth": 4},
    "1:1": {"encoder_width": 192, "encoder_depth": 5, "backbone_width": 192, "backbone_depth": 4},
    "3:1": {"encoder_width": 256, "encoder_depth": 5, "backbone_width": 144, "backbone_depth": 3},
    "frozen": {
        "encoder_width": 256,
        "encoder_depth": 9,
        "backbone_width": 384,
        "backbone_depth": 4,
        "vocabulary": 8192,
        "freeze_encoder": True,
    },
    "vocabulary": {
        "encoder_width": 384,
        "encoder_depth": 12,
        "encoder_heads": 6,
        "backbone_width": 192,
        "backbone_depth": 3,
        "vocabulary": 24_576,
        "freeze_encoder": True,
    },
    "tiny": {"encoder_width": 32, "encoder_depth": 1, "backbone_width": 32, "backbone_depth": 1},
}
"""Work of the encoder to work of the backbone, about, or what is special -> sizes of the quickstart's model."""


@dataclass(frozen=True)
class Work:
    """What every variant trains on.

    Attributes:
        records: the training file.
        cache: folder of its index.
        global_batch_size: samples of a step over both ranks.
        token_budget: the most tokens of a packed microbatch; longer samples are left out everywhere.
        images: what becomes of pictures.
        num_workers: processes that load, of each rank.
    """

    records: Path
    cache: Path
    global_batch_size: int = 32
    token_budget: int = 512
    images: ImageProcessor = IMAGES
    num_workers: int = 0

    def data(self) -> FlowDataModule:
        """The data module of the packed variants."""
        return FlowDataModule(
            self.records,
            tokenizer=TOKENIZER,
            images=self.images,
            global_batch_size=self.global_batch_size,
            token_budget=self.token_budget,
            seed=SEED,
            index=IndexConfig(too_long="drop", cache_dir=self.cache),
            num_workers=self.num_workers,
        )


def sizes(name: str) -> dict[str, Any]:
    """Keyword arguments of `QuickstartVLM` for a balance of ``MODULES``."""
    return {"patch_dim": IMAGES.patch_dim, "merge_size": IMAGES.merge_size, "learning_rate": 2e-4, **MODULES[name]}


def packed_module(name: str) -> QuickstartVLM:
    """The module of the packed variants."""
    return QuickstartVLM(**sizes(name))


def training_records() -> Path:
    """Photographs and drawings where ``FLOWTRAIN_DATA`` has them, else the drawings of the quickstart."""
    folder = Path(os.environ.get("FLOWTRAIN_DATA", ROOT / "../shared/data"))
    real = (folder / "mini_vl/train.jsonl").resolve()
    return real if real.is_file() else ROOT / "recipes/quickstart/data/train.jsonl"
