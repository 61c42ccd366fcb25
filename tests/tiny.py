"""A vision-language model, pictures and a tokenizer so small that a step takes milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import flowtrain_lightning as flow
from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.data import FlowDataModule, ImageProcessor, PackedBatch, PackedMedia

IMAGES = ImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
WIDTH = 16
HEADS = 2
WORDS = ("red", "green", "blue", "grey", "dark", "light", "round", "wide", "tall", "small")


class CharTokenizer:
    """One id per character, after a few special tokens."""

    specials = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    fingerprint = "characters"
    vocabulary = 6 + 128

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            special = next((s for s in self.specials if text.startswith(s)), None)
            ids.append(self.specials.index(special) if special else 6 + min(ord(text[0]), 127))
            text = text[len(special) if special else 1 :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i - 6) for i in ids if i >= 6)

    def token_to_id(self, token: str) -> int | None:
        return self.specials.index(token) if token in self.specials else None


class Block(nn.Module):
    """Attention and a two-layer perceptron, on packed sequences."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
        query, key, value = self.attention(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(1)
        x = x + self.out(varlen_attention(query, key, value, cu_seqlens, max_seqlen, causal).flatten(1))
        return x + self.mlp(x)


class Encoder(nn.Module):
    """Patches -> one or two tensors of features, a row per 2 x 2 patches."""

    def __init__(self, levels: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(IMAGES.patch_dim, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.block = Block(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(levels))

    def forward(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.dropout(self.embed(media.patches))
        x = self.block(x, media.cu_seqlens, media.max_seqlen, False).unflatten(0, (-1, 4)).flatten(1)
        return tuple(head(x) for head in self.heads)


class Backbone(nn.Module):
    """A decoder of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CharTokenizer.vocabulary, WIDTH)
        self.place = nn.Embedding(1024, WIDTH)
        self.block = Block(WIDTH)
        self.head = nn.Linear(WIDTH, CharTokenizer.vocabulary)

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = x + self.place(position_ids)
        return self.head(self.block(x, cu_seqlens, max_seqlen, True))


class TinyVLM(flow.FlowModule):
    """The module of most tests.

    Args:
        freeze_encoder: the encoder does not train.
        levels: tensors per row of features (two: as Qwen3-VL's deepstack).
        dropout: in the encoder.
        lr: of AdamW.
        weight_decay: of the encoder's group; the backbone's has none.
    """

    max_new_tokens = 4

    def __init__(
        self,
        freeze_encoder: bool = False,
        levels: int = 1,
        dropout: float = 0.0,
        lr: float = 1e-2,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_encoder(self) -> None:
        self.encoder = Encoder(self.hparams["levels"], self.hparams["dropout"])
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        self.backbone = Backbone()

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return self.encoder(media)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        x = self.backbone.embed(batch.tokens)
        if "image" in features:
            parts = features["image"] if isinstance(features["image"], tuple) else (features["image"],)
            for part in parts:
                x = x.index_add(0, batch.media_positions["image"], part.to(x.dtype))
        return {
            "x": x,
            "position_ids": batch.position_ids,
            "cu_seqlens": batch.cu_seqlens,
            "max_seqlen": batch.max_seqlen,
        }

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss = functional.cross_entropy(outputs, batch.labels, ignore_index=-100, reduction="sum")
        hits = (outputs.argmax(-1) == batch.labels).sum()
        tokens = int((batch.labels != -100).sum())
        self.log("accuracy", hits / max(tokens, 1))
        return loss, tokens

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.encoder.parameters()), "weight_decay": self.hparams["weight_decay"]},
            {"params": list(self.backbone.parameters()), "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def write_records(
    folder: Path,
    count: int,
    name: str = "train.jsonl",
    seed: int = 0,
    images: bool = True,
    pictures_of: Sequence[int] | None = None,
) -> Path:
    """Records of random words about random pictures: a third without a picture, some with two or three.

    ``pictures_of`` says instead how many pictures each record has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        pictures = int(draw.choice([0, 1, 2, 3], p=[0.3, 0.4, 0.2, 0.1])) if images else 0
        pictures = pictures if pictures_of is None else pictures_of[number]
        described = []
        for k in range(pictures):
            height, width = (int(n) for n in draw.integers(6, 40, 2))
            path = folder / f"{name}-{number}-{k}.png"
            Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
            described.append({"path": path.name, "h": height, "w": width})
        words = " ".join(draw.choice(WORDS, int(draw.integers(1, 6))))
        messages = [
            {"role": "user", "content": "<image>" * pictures + "what?"},
            {"role": "assistant", "content": words},
        ]
        lines.append(json.dumps({"id": f"{name}-{number}", "images": described, "messages": messages}))
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_data(folder: Path, kind: type[FlowDataModule] = FlowDataModule, **settings: Any) -> FlowDataModule:
    """A data module over the files that ``write_records`` wrote."""
    files = {stage: folder / f"{stage}.jsonl" for stage in ("train", "val", "test", "predict")}
    present: dict[str, Any] = {stage: path for stage, path in files.items() if path.is_file()}
    defaults = {"token_budget": 160, "global_batch_size": 8, "seed": 1, "images": IMAGES, "tokenizer": CharTokenizer()}
    return kind(**{**present, **defaults, **settings})
