"""Findings as sentences that name the method, what mixes, by how much, and how to mend it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Coupling = Literal["random", "batch_norm", "encode", "backbone", "loss"]
"""Couplings of a batch's samples that a user may allow: random numbers, batch statistics, or one of the methods."""

COUPLINGS: tuple[str, ...] = get_args(Coupling)

Kind = Literal["random", "batch_norm", "encode", "backbone", "loss", "count", "sum", "labels", "parts", "numbers"]


@dataclass(frozen=True)
class Method:
    """A part of the module that is checked by itself.

    Attributes:
        name: in sentences.
        kind: of what couples its items.
        items: what it is given together.
        bounds: where one of these ends and the next begins.
        seed: where a random generator of the user's own could take its seed from.
    """

    name: str
    kind: Literal["encode", "backbone"]
    items: str
    bounds: str
    seed: str


ENCODE = Method("encode", "encode", "media items", "media.cu_seqlens", "the item's own pixels")
BACKBONE = Method("merge or backbone", "backbone", "samples", "batch.cu_seqlens", "batch.samples")


class PackingCheckError(ValueError):
    """Packing changes what the module learns; the message has a sentence for each reason."""


@dataclass(frozen=True)
class Finding:
    """One way in which packing changes the result.

    Attributes:
        kind: what is coupled; what is no `Coupling` is an error in any case.
        sentence: says so.
    """

    kind: Kind
    sentence: str


def refuse_unknown_couplings(couples: Collection[str]) -> None:
    """Refuses names that mean nothing.

    Raises:
        ValueError: with the names that there are.
    """
    if isinstance(couples, str):
        raise ValueError(f"couples is the text {couples!r}; give a list, such as couples=[{couples!r}].")
    if unknown := [name for name in couples if name not in COUPLINGS]:
        raise ValueError(f"couples has {unknown[0]!r}; what may couple samples is {', '.join(map(repr, COUPLINGS))}.")


def divided(findings: Sequence[Finding], couples: Collection[str]) -> tuple[list[Finding], list[Finding]]:
    """Findings that the user did not name, and those that he did."""
    unnamed = [finding for finding in findings if finding.kind not in couples]
    return unnamed, [finding for finding in findings if finding.kind in couples]


def refuse(name: str, findings: Sequence[Finding]) -> None:
    """Raises where there are findings.

    Args:
        name: of the module's class.
        findings: which nobody named.

    Raises:
        PackingCheckError: with all sentences.
    """
    if not findings:
        return
    sentences = "\n".join(f"- {finding.sentence}" for finding in findings)
    named = sorted({finding.kind for finding in findings} & set(COUPLINGS))
    anyway = (
        f"\nIf samples are to be coupled so, say it: FlowTrainStrategy(couples={named}), or `couples = {named}` in the "
        "class of the module, for other strategies too. Gradients then depend on the layout."
        if named
        else ""
    )
    raise PackingCheckError(
        f"{name} does not learn from packed samples what it learns from each alone, so what it becomes would depend on "
        f"the packing:\n{sentences}{anyway}"
    )


@dataclass(frozen=True)
class Difference:
    """The difference between packed and alone.

    Attributes:
        together: how many were packed.
        packed: their loss.
        alone: the sum of their losses; None where there is no loss, as of `encode`.
        worst: name of the tensor that is furthest off; empty where only the loss is.
        error: its relative error.
        values_differ: features or the loss differ, and not gradients alone.
        other: how the first loss came about.
    """

    together: int
    packed: float | None
    alone: float | None
    worst: str
    error: float
    values_differ: bool
    other: str = "packed"

    @property
    def is_number(self) -> bool:
        """Whether packed gives numbers where alone does."""
        return math.isfinite(self.error)

    def __str__(self) -> str:
        parts = []
        if self.packed is not None and self.alone is not None:
            parts.append(f"loss {self.packed:.7g} {self.other}, {self.alone:.7g} in sum one by one")
        if self.worst:
            parts.append(f"{self.worst} {share(self.error)} off" if self.is_number else f"{self.worst} holds NaN")
        return "; ".join(parts)


def share(error: float) -> str:
    """A relative error for readers."""
    return f"{100 * error:.2g} %" if 1e-4 < error < 10 else f"{error:.1e}" if error <= 1e-4 else f"{error:.1f} times"


ENCODE_MIXES = (
    "encode: the features of a media item change with the others in its encoder batch ({difference}). Keep attention "
    "within media.cu_seqlens (flowtrain_lightning.attention.varlen_attention), and norms, pooling and shifts within an "
    "item."
)
ENCODE_PLACE = (
    "encode: the features of a media item depend on its place in the encoder batch ({difference}). Count positions and "
    "windows from the beginning of each item, by media.cu_seqlens and media.grid."
)
ENCODE_DIFFERS = (
    "encode: the features of a media item, or gradients through them, depend on what else is in its encoder batch "
    "({difference}). Compute each item by itself, within the bounds in media.cu_seqlens and media.grid."
)
PARTS_DIFFER = (
    "encode: it gives for the moments of a clip, or tiles of a picture, one by one other rows than within the whole "
    "({error:.1e} off), but encodes_parts_apart says that it does not. Keep attention and norms within a part (moments "
    "have their bounds in media.cu_seqlens), and take places from Clip.before or Tiles.before; or leave "
    "encodes_parts_apart out, and media stay whole."
)
BACKBONE_MIXES = (
    "merge or backbone: a sample sees the tokens of others in its microbatch ({difference}). Keep attention within "
    "batch.cu_seqlens (flowtrain_lightning.attention.varlen_attention), and convolutions, scans, norms and routing "
    "within a sequence."
)
BACKBONE_PLACE = (
    "merge or backbone: a sample's outputs depend on its place in the microbatch, or on how long that is "
    "({difference}). Take positions from batch.position_ids, which begin at 0 in every sequence, and count windows, "
    "chunks and capacities from batch.cu_seqlens."
)
LOSS_COUPLES = (
    "loss: the loss of a sample changes with the others in its microbatch, though the backbone's outputs for it do not "
    "({difference}). Return a sum over tokens in which no term has parts of two samples."
)
NOT_ITS_OWN = (
    "merge or backbone: even one sample alone gives something else than the model's own forward does ({difference}). "
    "That sees something that packed attention does not show it, such as tokens of an image that see those behind "
    "them, or positions by a rule of its own. Define pack_backbone and merge so that they do, as GemmaVLM does."
)
SOMETHING_COUPLES = (
    "backbone_step: what a sample teaches changes with the others in its microbatch ({difference}). Attention, "
    "convolutions, norms, positions or the loss reach over the bounds in batch.cu_seqlens: use "
    "flowtrain_lightning.attention.varlen_attention and batch.position_ids, and return a loss that is a sum over "
    "tokens."
)
BACKWARD_COUPLES = (
    "{method}: values are right, but gradients change with what else is in the batch ({difference}). A hook, a custom "
    "backward or clipping inside the module works on the whole batch; move it to on_before_optimizer_step, or keep it "
    "within {bounds}."
)
STATE = (
    "{method}: a second call gives something else than the first ({difference}). It keeps something between calls, "
    "such as a mask or positions of an earlier batch, or running numbers; compute it from the batch of each call."
)
STATE_RAISES = (
    "{method}: a second call raises an error, though the first one does not: {error}. It keeps something between "
    "calls, such as a mask or positions of an earlier batch; compute it from the batch of each call."
)
RAISES = "{method}: {together} packed together raise an error, though each alone does not: {error}"
MEAN = (
    "loss: it is a mean over the microbatch ({difference}), which would weigh a token by what it is packed with. "
    "Return the sum over the target tokens and their number; the step divides once."
)
COUNT = (
    "loss: it returns {packed:g} as the number of targets of {together} packed together, but {alone:g} in sum one "
    "by one. Return the number of target tokens of the microbatch."
)
SHIFTED = (
    "loss: it teaches each token what the next one is to predict: labels are shifted twice. batch.labels are shifted "
    "already: the label of a token stands at its own place; compare outputs and batch.labels as they are."
)
OWN_TOKENS = (
    "loss: it teaches each token to repeat itself: it reads batch.tokens as labels, or labels a place too late. "
    "Compare the outputs with batch.labels, which are shifted already and leave out what is not learned."
)
RANDOM = (
    "{method}: it draws random numbers (such as F.dropout, layer drop or noise), which then belong to a batch and not "
    "to a sample. Use nn.Dropout, which the log tells of, or a torch.Generator that is seeded by {seed}."
)
BATCH_NORM = (
    "{method}: {layers} by the statistics of whatever is packed together. Use a norm over each item (GroupNorm, "
    "LayerNorm), or freeze the statistics: call eval() on the layer where it is built (Lightning calls no train())."
)
NO_NUMBERS = (
    "{method}: packed together there is something that is no number, NaN or infinite, where each alone has numbers "
    "({difference}). Look for a quotient, a root or a norm of what may be empty or 0 within {bounds}, such as a mean "
    "over the images of a sample without any: torch.where leaves the NaN of its other side in the gradient."
)
NO_NUMBERS_ALONE = (
    "{method} gives something that is no number, NaN or infinite, for {items} one by one, so that {names} could not be "
    "compared."
)
TAKES_LONG = (
    "flowtrain: whether packing changes what {module} learns is checked once, on {device}, with one block of every "
    "kind ({weights:.0f} million weights)."
)
NOT_COMPARED = (
    "the model's own forward, for one sample without packing, could not be run beside it ({error}): whether some "
    "tokens see those behind them was not checked."
)
NOTHING_LEARNED = (
    "the loss of each of {samples} samples is 0, and so is every gradient, so that there was nothing to compare. Where "
    "that is not so in training, check with data that have targets."
)
UNLABELLED = (
    "the loss is taken at {count} tokens without a label too. That is right if it is meant so, as of a z-loss; else "
    "pass ignore_index=-100, or compute logits at batch.targets only."
)
