"""Why packed differs from alone: what flows between samples, found by changing one and looking at the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.data.batch import IGNORED_LABEL
from flowtrain_lightning.packing_check import findings as say
from flowtrain_lightning.packing_check.findings import BACKBONE, ENCODE, Difference, Finding
from flowtrain_lightning.packing_check.output_rows import (
    sign_of_own_tokens,
    sign_of_shifted_labels,
    tokens_without_labels,
)
from flowtrain_lightning.packing_check.passes import FeaturesOfItems, Passes
from flowtrain_lightning.packing_check.rounding import EXACT
from flowtrain_lightning.packing_check.samples import Item


def encoder_finding(passes: Passes, modality: str, items: Sequence[Item], difference: Difference) -> Finding:
    """Says why features, or gradients through them, differ for items that are encoded together."""
    if not difference.is_number:
        return _of_no_numbers(ENCODE.name, ENCODE.bounds, difference)
    if not difference.values_differ:
        sentence = say.BACKWARD_COUPLES.format(method=ENCODE.name, difference=difference, bounds=ENCODE.bounds)
        return Finding("encode", sentence)
    flows = _picture_flows(passes, modality, items)
    return Finding("encode", (say.ENCODE_MIXES if flows else say.ENCODE_PLACE).format(difference=difference))


def backbone_finding(
    passes: Passes, members: Sequence[int], features: FeaturesOfItems, difference: Difference, tolerance: float
) -> Finding:
    """Says why the loss, or gradients, differ for samples that are packed together."""
    if not difference.is_number:
        return _of_no_numbers("merge, backbone or loss", BACKBONE.bounds, difference)
    together = passes.outputs(members, features)
    alone = [passes.outputs([member], features).rows for member in members]
    known = [rows for rows in alone if rows is not None]
    if together.rows is None or len(known) < len(members):
        return Finding("backbone", say.SOMETHING_COUPLES.format(difference=difference))
    own = together.rows[: sum(map(len, known))]  # what follows is padding
    if float((own - torch.cat(known)).norm()) > tolerance * float(own.norm()):
        flows = _content_flows(passes, members, features, together.batch, own)
        return Finding("backbone", (say.BACKBONE_MIXES if flows else say.BACKBONE_PLACE).format(difference=difference))
    if difference.values_differ:
        return Finding("loss", say.LOSS_COUPLES.format(difference=difference))
    sentence = say.BACKWARD_COUPLES.format(method="backbone or loss", difference=difference, bounds=BACKBONE.bounds)
    return Finding("backbone", sentence)


def _of_no_numbers(method: str, bounds: str, difference: Difference) -> Finding:
    return Finding("numbers", say.NO_NUMBERS.format(method=method, difference=difference, bounds=bounds))


def label_findings(
    passes: Passes, members: Sequence[int], features: FeaturesOfItems
) -> tuple[list[Finding], list[str]]:
    """Sure signs that labels are misread, and a hint where tokens without labels are learned from."""
    outputs = passes.outputs(members, features)
    if outputs.gradient is None:
        return ([Finding("labels", say.SHIFTED)], []) if _misses_own_tokens(passes, members, features) else ([], [])
    if sign_of_shifted_labels(outputs.batch, outputs.gradient):
        return [Finding("labels", say.SHIFTED)], []
    if sign_of_own_tokens(outputs.batch, outputs.gradient):
        return [Finding("labels", say.OWN_TOKENS)], []
    count = tokens_without_labels(outputs.batch, outputs.gradient)
    return [], [say.UNLABELLED.format(count=count)] if count else []


def _misses_own_tokens(passes: Passes, members: Sequence[int], features: FeaturesOfItems) -> bool:
    """Whether the loss at a token depends on the one before it and not on itself: labels are shifted twice.

    For modules that give no row for each token. One that learns masked tokens looks at those behind them, too.
    """
    signs: list[bool] = []
    for member in members:
        batch = passes.microbatch([member], together=False)
        words = set(range(len(batch.tokens))).difference(*(rows.tolist() for rows in batch.media_positions.values()))
        for target in [place for place in batch.targets.tolist() if words.issuperset(range(place - 1, place + 2))][:1]:
            labels = torch.full_like(batch.labels, IGNORED_LABEL)
            labels[target] = batch.labels[target]
            one = replace(batch, labels=labels, targets=batch.targets.new_tensor([target]))

            def loss(tokens: Tensor, member: int = member, one: PackedBatch = one) -> float:
                return passes.loss_alone(member, features, replace(one, tokens=tokens))

            is_, changes = loss(batch.tokens), []
            for place in range(target - 1, target + 2):
                tokens = batch.tokens.clone()
                tokens[place] = next(token for token in batch.tokens[sorted(words)] if token != tokens[place])
                changes.append(abs(loss(tokens) - is_) > EXACT * abs(is_))
            signs.append(changes == [True, False, False])
    return bool(signs) and all(signs)


def _picture_flows(passes: Passes, modality: str, items: Sequence[Item]) -> bool:
    """Whether the features of some media item change with what another one shows."""
    _, before = passes.encode(modality, [items])
    for changed in items:
        _, after = passes.encode(modality, [items], changed)
        others = [item for item in items if item != changed]
        if any(not torch.equal(*pair) for item in others for pair in zip(before[item], after[item], strict=True)):
            return True
    return False


def _content_flows(
    passes: Passes, members: Sequence[int], features: FeaturesOfItems, batch: PackedBatch, rows: Tensor
) -> bool:
    """Whether the outputs for some sample change with the words and pictures of another one."""
    media = {place for positions in batch.media_positions.values() for place in positions.tolist()}
    for number, member in enumerate(members):
        start, end = batch.cu_seqlens[number : number + 2].tolist()
        words = torch.tensor([place for place in range(start, end) if place not in media], dtype=torch.int64)
        tokens = batch.tokens.clone()
        tokens[words] = batch.tokens[words].roll(1)
        shown = {item: tuple(-each for each in of_item) for item, of_item in features.items() if item[0] == member}
        changed = passes.outputs(members, features | shown, replace(batch, tokens=tokens)).rows
        if changed is None:
            return False
        if not torch.equal(changed[:start], rows[:start]) or not torch.equal(changed[end : len(rows)], rows[end:]):
            return True
    return False
