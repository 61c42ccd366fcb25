"""What queries read in the quickstart's model over many prompts: the mean and the spread of each number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from flowtrain_lightning.data import ChatTemplate
from recipes.metaquery.scenes import SIDE, Wish, random_box, sketch, words
from recipes.quickstart.model import patch_positions
from recipes.quickstart.module import QuickstartVLM

TOKENIZER = Path(__file__).parent.parent / "quickstart" / "tokenizer.json"
_PATCH, _MERGE = 8, 2


@torch.no_grad()
def reading_of(model: QuickstartVLM, queries: Tensor, asked: list[Wish]) -> tuple[Tensor, Tensor]:
    """What queries at the end of a prompt read, each prompt with a sketch.

    Args:
        model: the quickstart's.
        queries: ``[queries, width]``.
        asked: a prompt for each.

    Returns:
        ``[queries, width]`` mean, and the same of the standard deviation.
    """
    tokenizer, template, draw = Tokenizer.from_file(str(TOKENIZER)), ChatTemplate(), np.random.default_rng(0)
    rows, lengths = [], []
    for wish in asked:
        shown = f"<|im_start|>user\n{template.before_image}"
        said = f"{template.after_image}{words(wish)}{template.end}\n<|im_start|>assistant\n{template.before_image}"
        before, behind = (model.backbone.embed(torch.tensor(tokenizer.encode(text).ids)) for text in (shown, said))
        seen = model.backbone.project(_features(model.encoder, np.asarray(sketch(random_box(draw)))))
        rows += [before, seen, behind, queries]
        lengths.append(sum(map(len, rows[-4:])))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    states = model.backbone.states(torch.cat(rows), positions, bounds.int(), max(lengths))
    read = torch.stack([states[end - len(queries) : end] for end in bounds[1:].tolist()])
    return read.mean(0), read.std(0)


def _features(encoder: nn.Module, pixels: np.ndarray) -> Tensor:
    """Features of one sketch, whose patches lie block after block."""
    count = 2 * SIDE // _PATCH
    values = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 127.5 - 1
    blocks = values.reshape(3, count // _MERGE, _MERGE, _PATCH, count // _MERGE, _MERGE, _PATCH)
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(count**2, -1)
    positions = patch_positions(torch.tensor([[count, count]]), _MERGE)
    features: Tensor = encoder(patches, positions, torch.tensor([0, count**2], dtype=torch.int32), count**2)
    return features
