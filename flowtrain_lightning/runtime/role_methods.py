"""The user's methods that a rank runs for its roles, and the batches that they get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.joint_losses import JointLosses
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia, PackedTargets
from flowtrain_lightning.packing.stage_entries import hidden_modalities, hidden_states
from flowtrain_lightning.parallel.experts.expert_counts import counting_choices
from flowtrain_lightning.parallel.ranks.random_streams import global_seed
from flowtrain_lightning.runtime.gathering import Gathering
from flowtrain_lightning.runtime.program import PADDING, RankBatch
from flowtrain_lightning.runtime.step import RankContext, Step


class ForwardResult(NamedTuple):
    """The results of a forward.

    Attributes:
        rows: that others read.
        loss: summed, or ``[losses]``; None of a role that has none, or where it is not differentiated.
        seed: the gradient of the loss; None of one that counts for nothing.
    """

    rows: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    seed: Tensor | None = None


class RoleMethod(Protocol):
    """Runs the forward of one role."""

    batch_name: str
    """The name of a batch of the role."""

    def forward(
        self, step: Step, member: int, batch: RankBatch, read: Gathering, *, keep: bool, again: bool = False
    ) -> ForwardResult:
        """The forward of one batch.

        Args:
            step: the step.
            member: of the role, to which this rank belongs.
            batch: which one.
            read: what it reads, complete.
            keep: its backward will follow.
            again: it ran before, without ``keep``: what is logged and counted was counted then.
        """

    def is_for_nothing(self, batch: RankBatch) -> bool:
        """Whether a batch need not be computed that has no backward."""


class EncoderMethod:
    """Runs ``encode``.

    Args:
        context: what the rank works with.
        role: the encoder.
        meets_in_forwards: other ranks need this one in every forward; else padding batches are for backwards alone.
    """

    batch_name = "encoder batch"

    def __init__(self, context: RankContext, role: str, *, meets_in_forwards: bool = True) -> None:
        self._context = context
        self._role = role
        self._meets_in_forwards = meets_in_forwards

    def forward(
        self, step: Step, member: int, batch: RankBatch, read: Gathering, *, keep: bool, again: bool = False
    ) -> ForwardResult:
        """See `RoleMethod`."""
        is_padding = batch.number == PADDING
        media = step.batch.padding_media[self._role] if is_padding else step.batch.media[self._role][batch.number]
        assert media is not None
        stream = batch.number * len(step.plan.batches[self._role]) + member
        hidden = read.tensors(name := hidden_states(self._role))
        if is_padding:
            hidden = hidden_in_place(step, self._context.compute, self._role, media)
        for tensor in hidden:  # of the stage before: a leaf of the graph, which has a gradient after the backward
            assert tensor is not None, "each batch has rows"
            tensor.requires_grad_(name in step.answered)
        with torch.set_grad_enabled(keep), counting_choices(step.stage == "train" and not is_padding):
            rows = self._context.compute.encode(self._role, media, *hidden, step=step.name, number=stream)
        return ForwardResult(rows)

    def is_for_nothing(self, batch: RankBatch) -> bool:
        """See `RoleMethod`."""
        return batch.number == PADDING and not self._meets_in_forwards


class BackboneMethod:
    """Runs ``backbone_step``.

    Args:
        context: what the rank works with.
        predictions: to which they are appended, on the rank that speaks for those that share a microbatch.
        speaks: this rank does.
        counts: its losses and logged values count; of tensor ranks, which all have the same, those of the first do.
        losses: says what the loss is divided by where others join it; None: it has none beside it.
    """

    batch_name = "microbatch"

    def __init__(
        self,
        context: RankContext,
        predictions: list[Any],
        *,
        speaks: bool,
        counts: bool,
        losses: JointLosses | None = None,
    ) -> None:
        self._losses = losses
        self._context = context
        self._predictions = predictions
        self._speaks = speaks
        self._counts = counts

    def forward(
        self, step: Step, member: int, batch: RankBatch, read: Gathering, *, keep: bool, again: bool = False
    ) -> ForwardResult:
        """See `RoleMethod`; the rows that it reads are leaves of the graph, and have gradients after the backward."""
        compute, packed = self._context.compute, step.batch.microbatches[batch.number]
        assert packed is not None
        rows = {name: tuple(each for each in read.tensors(name) if each is not None) for name in read.names}
        packed, features = with_features(step, compute, packed, rows)
        if step.stage == "train" and batch.number == 0:
            compute.check_context(packed, features, batch.chunk)
        is_padding = not packed.samples
        with torch.set_grad_enabled(keep), counting_choices(step.stage == "train" and not is_padding):
            result, made = compute.microbatch_and_rows(
                packed,
                features,
                stage=step.stage,
                step=step.name,
                number=batch.number * len(step.plan.microbatches) + member,
                counts=self._counts and not again,
                chunk=batch.chunk,
            )
        if step.stage == "predict":
            self._predictions += [] if is_padding or not self._speaks else [result]
        if result is None or not keep or not result.requires_grad:
            return ForwardResult(made)
        if is_padding:
            return ForwardResult(made, result)
        trunk, losses = step.plan.graph.trunk, self._losses
        seed = torch.ones_like(result) if losses is None else losses.gradient(result, step.plan, trunk)
        return ForwardResult(made, result, seed)

    def is_for_nothing(self, batch: RankBatch) -> bool:
        """See `RoleMethod`: each microbatch has samples, or is one that others need."""
        return False


class GeneratorMethod:
    """Runs ``generator_loss``.

    Args:
        context: what the rank works with.
        role: behind the trunk.
        losses: says what its loss is divided by.
        counts: its losses and logged values count.
    """

    def __init__(self, context: RankContext, role: str, losses: JointLosses, *, counts: bool) -> None:
        self.batch_name = f"{role} batch"
        self._context = context
        self._role = role
        self._losses = losses
        self._counts = counts

    def forward(
        self, step: Step, member: int, batch: RankBatch, read: Gathering, *, keep: bool, again: bool = False
    ) -> ForwardResult:
        """See `RoleMethod`; the rows that it reads are leaves of the graph, and have gradients after the backward."""
        role, compute, is_padding = self._role, self._context.compute, batch.number == PADDING
        media = step.batch.padding_media[role] if is_padding else step.batch.media[role][batch.number]
        assert media is not None
        items = PackedTargets(media, global_seed(), *step.name)
        if is_padding:
            condition = zero_rows(compute, media.modality, sum(items.condition_rows))
        else:
            condition = tuple(each for each in read.tensors(media.modality) if each is not None)
            for tensor in condition:
                tensor.requires_grad_(media.modality in step.answered and tensor.is_floating_point())
        with counting_choices(step.stage == "train" and not is_padding):
            loss = compute.generate(
                role,
                items,
                condition,
                stage=step.stage,
                number=batch.number * len(step.plan.batches[role]) + member,
                counts=self._counts and not is_padding,
            )
        if not keep or not loss.requires_grad:
            return ForwardResult()
        if is_padding:
            return ForwardResult(loss=loss)
        return ForwardResult(loss=loss, seed=self._losses.gradient(loss, step.plan, role, compute.patch_dims[role]))

    def is_for_nothing(self, batch: RankBatch) -> bool:
        """See `RoleMethod`: where nothing is learned, other ranks still gather weights in every forward."""
        return False


def no_rows(compute: Compute, modality: str) -> tuple[Tensor, ...]:
    """No rows of a modality."""
    return compute.specs[modality].no_rows(compute.device)


def zero_rows(compute: Compute, modality: str, count: int) -> tuple[Tensor, ...]:
    """So many rows of a modality, of zeros."""
    return tuple(each.new_zeros(count, *each.shape[1:]) for each in no_rows(compute, modality))


def hidden_in_place(step: Step, compute: Compute, role: str, media: PackedMedia) -> tuple[Tensor, ...]:
    """Zeros in place of what the stage before makes of media, where nobody hands it on; nothing on the first stage."""
    if step.batch.shard.stages.get(role, 0) == 0:
        return ()
    return zero_rows(compute, hidden_states(role), media.patch_count)


def with_features(
    step: Step, compute: Compute, packed: PackedBatch, rows: dict[str, tuple[Tensor, ...]]
) -> tuple[PackedBatch, Features]:
    """A microbatch and its features.

    Args:
        step: the step.
        compute: knows what rows are.
        packed: the microbatch.
        rows: modality -> rows of features that it reads, and of hidden states.
    """
    if (members := step.batch.shard.members).meeting(members.trunk).passes:
        # Other ranks may have media now, and sum gradients of all that a layout gathers together. So what only
        # features meet, such as a projector, takes part here as well.
        others = {*step.plan.graph.generated, *hidden_modalities(members)}
        encoded = (modality for modality in step.program.modalities if modality not in others)
        absent = [modality for modality in encoded if modality not in rows]
        rows = {**rows, **{modality: no_rows(compute, modality) for modality in absent}}
        places = {**packed.media_positions, **dict.fromkeys(absent, packed.tokens[:0])}
        packed = replace(packed, media_positions=places)
    features: Features = {}
    for modality, tensors in sorted(rows.items()):
        for tensor in tensors:
            tensor.requires_grad_(modality in step.answered and tensor.is_floating_point())
        features |= as_features(modality, tensors)
    return packed, features
