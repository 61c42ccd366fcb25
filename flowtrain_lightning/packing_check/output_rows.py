"""Signs in what a backbone gives for each token: which tokens the loss is taken at, and what it teaches them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.data.batch import IGNORED_LABEL

_SURE = 0.95
"""Share of tokens that must show a sign for it to be one."""
_SELDOM = 0.5


def output_rows(outputs: Any, tokens: int) -> Tensor | None:
    """The tensor among a backbone's outputs that has a row for each token: logits first, else hidden states."""
    named = [getattr(outputs, name, None) for name in ("logits", "last_hidden_state")]
    listed = (
        list(outputs.values()) if isinstance(outputs, dict) else list(outputs) if isinstance(outputs, tuple) else []
    )
    for tensor in (outputs, *named, *listed):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
            rows = tensor[0] if tensor.shape[0] == 1 and tensor.ndim > 2 else tensor
            if rows.shape[0] == tokens:
                return tensor
    return None


def sign_of_shifted_labels(batch: PackedBatch, gradient: Tensor) -> bool:
    """Whether the loss is taken one token before each label: labels that are shifted already were shifted once more.

    Args:
        batch: the microbatch.
        gradient: ``[tokens, width]`` of the loss by the backbone's outputs.
    """
    targets = batch.targets
    used = gradient.abs().sum(1).nonzero().flatten()
    before = targets[targets > 0] - 1
    if len(before) and torch.equal(used, before) and not torch.equal(used, targets):
        return True
    taught = _taught(batch, gradient)
    if taught is None or not len(before):
        return False
    labels = batch.labels
    tellable = before[labels[before] != labels[before + 1]]
    shifted = taught[tellable] == labels[tellable + 1]
    right = taught[targets] == labels[targets]
    return _share(shifted) > _SURE and _share(right) < _SELDOM


def sign_of_own_tokens(batch: PackedBatch, gradient: Tensor) -> bool:
    """Whether each token is taught to repeat itself: ``batch.tokens`` were taken for labels."""
    taught = _taught(batch, gradient)
    if taught is None:
        return False
    tellable = batch.targets[batch.tokens[batch.targets] != batch.labels[batch.targets]]
    tellable = tellable[taught[tellable] >= 0]  # the first of an answer is taught nothing by labels a place too late
    own = taught[tellable] == batch.tokens[tellable]
    return _share(own) > _SURE


def tokens_without_labels(batch: PackedBatch, gradient: Tensor) -> int:
    """At how many tokens that have no label the loss is taken."""
    used = gradient.abs().sum(1) > 0
    return int((used & (batch.labels == IGNORED_LABEL)).sum())


def _taught(batch: PackedBatch, gradient: Tensor) -> Tensor | None:
    """``[tokens]`` the id that each token is taught to predict, where outputs are logits: cross entropy raises it."""
    if gradient.shape[1] <= int(max(batch.labels.max(), batch.tokens.max())):
        return None
    lowest, taught = gradient.min(1)
    return torch.where(lowest < 0, taught, IGNORED_LABEL - 1)


def _share(signs: Tensor) -> float:
    return float(signs.double().mean()) if len(signs) else 0.0
