"""The two computations of a step, alike in every placement: one encoder batch, one microbatch; what passes between."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor

from flowtrain_lightning.compute.checked_outputs import checked_condition, checked_features
from flowtrain_lightning.compute.context_check import ContextCheck
from flowtrain_lightning.compute.context_loss import LossInParts
from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.compute.feature_spec import FeatureSpec
from flowtrain_lightning.compute.kept_features import KeptFeatures
from flowtrain_lightning.compute.kept_metrics import kept_metrics
from flowtrain_lightning.compute.named_losses import ReturnedLosses, loss_names, returned_losses
from flowtrain_lightning.compute.stage_step import StageMethod, StageStep, where_stages_look
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.compute.user_methods import UserMethods
from flowtrain_lightning.compute.weight_casts import WeightCasts
from flowtrain_lightning.compute.zeros_beside import ZerosBeside
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia, PackedTargets
from flowtrain_lightning.packing.stage_entries import hidden_states
from flowtrain_lightning.parallel import HalfEngine
from flowtrain_lightning.parallel.context_parallel import ContextParallelHalf
from flowtrain_lightning.parallel.ranks.random_streams import enter_stream
from flowtrain_lightning.parallel.stages.late_weights import LateWeight, LateWeights

_COPY_STREAMS = 4
_NOTHING = nullcontext()
_Packed = TypeVar("_Packed", PackedMedia, PackedBatch, PackedTargets)


class Compute:
    """Calls the user's methods with the right device, precision, random stream and metrics.

    Attributes:
        metrics: one accumulator for each stage, since a name may be logged with other options in validation than in
            training.
        metrics_behind: role behind the trunk -> the same for its own loss.
        patch_dims: role behind the trunk -> numbers of a patch of what it generates, once it is known.
        specs: modality -> what a row of features was found to be, for which bytes are reserved; none where nobody
            reserves any.
        zeros: that this rank sends back beside other ranks.
        copies: role -> streams for what comes through the pool: batches that wait at the same time take one each. Roles
            share none: gradients would wait for features that another rank still makes.

    Args:
        module: the user's.
        trainer: its precision plugin converts what the encoder gets.
        device: on which this rank computes.
        engines: role -> what the role's layout does around each forward and backward, for the roles of this rank.
        keeps_casts: roles whose weights autocast casts once until `end_step`; others cast them in every forward.
        trading: roles whose backwards bring gradients of other ranks' losses; see `ZerosBeside`.
    """

    def __init__(
        self,
        module: UserMethods,
        trainer: L.Trainer,
        device: torch.device,
        engines: Mapping[str, HalfEngine],
        keeps_casts: Collection[str] = (),
        trading: Collection[str] = (),
    ) -> None:
        self.device = device
        self._engines = engines
        self._has_autocast = torch.amp.is_autocast_available(device.type)
        self._casts = WeightCasts(device.type)
        self._keeps_casts = frozenset(keeps_casts)
        self.zeros = ZerosBeside(trading)
        self._names = loss_names(module)
        self._accumulator = partial(MetricAccumulator, self._names[1:])
        self.metrics: defaultdict[str, MetricAccumulator] = defaultdict(self._accumulator)
        self.metrics_behind: defaultdict[str, defaultdict[str, MetricAccumulator]] = defaultdict(
            lambda: defaultdict(MetricAccumulator)
        )
        self.patch_dims: dict[str, int] = {}
        self.specs: dict[str, FeatureSpec] = {}
        self.copies = {role: [CopyStream(device) for _ in range(_COPY_STREAMS)] for role in engines}
        self._inputs = CopyStream(device)
        self._module = module
        self._name = type(module).__name__
        self._convert_input = trainer.precision_plugin.convert_input
        self._trunk = module.role_graph.trunk
        self._generated = module.role_graph.generated
        shared = {role: each.exchange for role, each in engines.items() if isinstance(each, ContextParallelHalf)}
        methods = {self._trunk: StageMethod(module.backbone_step, lambda batch: len(batch.tokens))}
        encode = StageMethod(module.encode, lambda media: media.patch_count)
        self._stages = {
            role: StageStep(methods.get(role, encode), staged, shared.get(role))
            for role, staged in module.staged.items()
        }
        self._chunk_on_trial = 0
        self._context_check = self._make_context_check()
        self._kept = KeptFeatures(module)

    def encode(
        self, role: str, media: PackedMedia, hidden: Tensor | None = None, *, step: tuple[int, int], number: int
    ) -> tuple[Tensor, ...]:
        """Features of one encoder batch, always as a tuple: ``[sum(media.rows), ...]`` each; or its hidden states.

        Args:
            role: whose encoder it is.
            media: the encoder batch.
            hidden: ``[patches, width]`` of the stage before, of an encoder in stages.
            step: epoch and step, which with ``number`` name the random stream.
            number: which encoder batch of the step it is, counted over all encoder ranks.

        Raises:
            TypeError: the user's ``encode`` returned no tensors.
            ValueError: it returned another number of rows than the plan promises, or rows that take more bytes than
                when it was first tried.
        """
        if media.kept is not None:
            enter, encode = partial(enter_stream, role, *step, number), partial(self._encode, role, *step, number)
            return self._kept.features(role, media, enter, encode, self.device)
        return self._encode(role, *step, number, media, hidden)

    def _encode(
        self, role: str, epoch: int, step: int, number: int, media: PackedMedia, hidden: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The features of media items of which none is kept; see `encode`."""
        here = media if media.pixels.device == self.device else self._fetched(media)
        patches = here.patches.clone() if here is media else here.patches  # `encode` may write there, and run again
        media = here.with_patches(self._convert_input(patches))
        enter_stream(role, epoch, step, number, *self._place(role, 0))
        with self._module.logging_refused("encode"):
            output = self._through(role, 0, hidden, self._module.encode, media)
        if not self._ends_in(role, 0):
            return self._checked_width((output,), hidden_states(role), "encode has hidden states")
        features = checked_features(output, media, self._name)
        return self._checked_width(features, media.modality, "encode returned features")

    def microbatch(
        self,
        batch: PackedBatch,
        features: Features,
        *,
        stage: str,
        step: tuple[int, int],
        number: int,
        counts: bool = True,
    ) -> Any:
        """The user's ``backbone_step``: the summed loss, or what it returns for predictions."""
        return self.microbatch_and_rows(batch, features, stage=stage, step=step, number=number, counts=counts)[0]

    def microbatch_and_rows(
        self,
        batch: PackedBatch,
        features: Features,
        *,
        stage: str,
        step: tuple[int, int],
        number: int,
        counts: bool = True,
        chunk: int = 0,
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """The user's ``backbone_step``: the summed loss, or what it returns for predictions; and rows that others read.

        Losses, their counts and logged values go into the stage's metrics; the loss, or ``[losses]``, is returned to be
        differentiated. Of a stage ``chunk`` says which blocks compute; where they are not the last, rows are hidden
        states.

        Raises:
            TypeError: a step with a loss returned something else than summed losses and their counts, and rows where
                some role reads them.
            ValueError: the rows are not as many as what is to be generated has places in the microbatch.
        """
        if batch.tokens.device != self.device:
            batch = self._fetched(batch)
        enter_stream(self._trunk, *step, number, *self._place(self._trunk, chunk))
        if stage == "predict":
            with self._module.logging_refused("predictions"):
                return self._call(self._trunk, self._module.backbone_step, batch, features, stage), ()
        # Padding counts for nothing, and a microbatch once that tensor ranks or chunks of a stage share.
        counts = bool(batch.samples) and counts and self._ends_in(self._trunk, chunk)
        metrics = self.metrics[stage] if counts else self._accumulator()
        with self._module.logging_into(metrics):
            hidden = None
            if self._trunk in self._stages:
                hidden, features = self._stages[self._trunk].taken_out(features)
            output = self._through(self._trunk, chunk, hidden, self._module.backbone_step, batch, features, stage)
        if not self._ends_in(self._trunk, chunk):
            return None, self._checked_width((output,), hidden_states(self._trunk), "backbone_step has hidden states")
        returned = self._returned(output)
        rows: tuple[Tensor, ...] = ()
        if self._generated:
            places = sum(len(batch.media_positions.get(modality, ())) for modality in self._generated)
            rows = checked_condition(returned.rest, places, self._name)
            rows = self._checked_width(rows, next(iter(self._generated)), "condition returned rows")
        first, *beside = zip(returned.losses, returned.counts, strict=True)
        metrics.close_microbatch(*first, beside)
        return returned.loss, rows

    def generate(
        self,
        role: str,
        items: PackedTargets,
        condition: tuple[Tensor, ...],
        *,
        stage: str,
        number: int,
        counts: bool = True,
    ) -> Tensor:
        """The user's ``generator_loss``: the summed loss, to be differentiated. It goes into the metrics of the role.

        Args:
            role: behind the trunk.
            items: what is to be generated.
            condition: rows of the trunk's outputs, in the order of the items.
            stage: whose metrics it goes to.
            number: which batch of the step it is, counted over all members of the role; it names the random stream of
                what does not take its numbers from the items.
            counts: it goes there.

        Raises:
            TypeError: it returned something else than one summed loss and a number of values.
        """
        if items.values.device != self.device:
            items = self._fetched(items)
        self.patch_dims[role] = items.values.shape[1]
        items = items.with_values(self._convert_input(items.values))
        enter_stream(role, items.epoch, items.step, number)
        metrics = self.metrics_behind[role][stage] if counts else MetricAccumulator()
        with self._module.logging_into(metrics):
            given = condition[0] if len(condition) == 1 else condition
            output = self._call(role, self._module.generator_loss, items, given)
        returned = returned_losses(output, (role,), f"{self._name}.generator_loss")
        metrics.close_microbatch(returned.loss, returned.counts[0])
        return returned.loss

    def check_context(self, batch: PackedBatch, features: Features, chunk: int = 0) -> None:
        """Before the first microbatch of a step that trains: context ranks compute what one rank does.

        Raises:
            ContextError: in the first steps, they do not.
        """
        if self._context_check is None:
            return
        self._chunk_on_trial = chunk
        if isinstance(hidden := features.get(name := hidden_states(self._trunk)), Tensor):
            engine = self._engines[self._trunk]
            assert isinstance(engine, ContextParallelHalf)
            rows = engine.exchange.gathered(hidden, len(batch.tokens)).requires_grad_(hidden.requires_grad)
            features = {**features, name: rows}
        self._context_check.look(batch if batch.tokens.device == self.device else self._fetched(batch), features)

    def _make_context_check(self) -> ContextCheck | None:
        engine = self._engines.get(self._trunk)
        if not isinstance(engine, ContextParallelHalf):
            return None

        def step(batch: PackedBatch, features: Features) -> tuple[Tensor, Any]:
            with self._module.logging_into(MetricAccumulator()):
                staged = self._stages.get(self._trunk)
                if staged is None:
                    return self._returned(self._module.backbone_step(batch, features, "train")).summed
                found = staged.on_trial(batch, features, self._chunk_on_trial)
                return self._returned(found).summed if staged.ends_in(self._chunk_on_trial) else found

        half = [self._module.get_submodule(path) for path in self._module.halves[self._trunk]]
        return ContextCheck(step, half, engine, LossInParts(self._module), partial(kept_metrics, self._module))

    def _returned(self, output: Any) -> ReturnedLosses:
        """Checks the losses and their counts that ``loss`` or ``backbone_step`` returned."""
        method = f"{self._name}.loss (or backbone_step)"
        returned = returned_losses(output, self._names, method, more=bool(self._generated))
        if self.device.type != "meta" and any(loss.is_meta for loss in returned.losses):
            raise RuntimeError(self._explained(self._trunk, "The loss is on device meta and has no value."))
        return returned

    def backward(
        self,
        role: str,
        outputs: tuple[Tensor, ...],
        gradients: tuple[Tensor | None, ...],
        *,
        last: bool,
        left: list[LateWeight] | None = None,
    ) -> bool:
        """Backward of the outputs that have a gradient.

        It runs outside autocast, as PyTorch advises: each operation runs in the precision of its forward.

        Args:
            role: whose half the backward goes through.
            outputs: with their graph.
            gradients: of each; None where it took no part in the loss.
            last: it is the step's last backward through this half on this rank.
            left: takes the gradients of weights that are left for `weights`; None: all are made.

        Returns:
            Whether any output has a gradient. Else what it brought is zero, and none in one process.
        """
        engine, kind = self._engines[role], self.device.type
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        reached = [(output, gradient) for output, gradient in pairs if gradient is not None]
        beside = [output for output, gradient in pairs if gradient is None] if engine.in_lockstep else []
        given = [*reached, *((output, torch.zeros_like(output)) for output in beside)]
        if not given:  # nothing that trains, or leads to it
            return False
        is_on = self._has_autocast and torch.is_autocast_enabled(kind)
        if role in self._keeps_casts:
            self._casts.keep_in_backward(output for output, _ in given)
        late = _NOTHING if left is None else self._stages[role].leaving(left)
        zeros = self.zeros.going_back(role, engine, beside, [output for output, _ in reached])
        with engine.backward(last=last), zeros, late, torch.autocast(kind, enabled=False) if is_on else _NOTHING:
            torch.autograd.backward([output for output, _ in given], [gradient for _, gradient in given])
        return bool(reached)

    def weights(self, role: str, left: list[LateWeight], *, last: bool) -> None:
        """The gradients of weights that a backward has left.

        Args:
            role: whose half it is.
            left: by the backward.
            last: it is the step's last work on this half on this rank.
        """
        with self._engines[role].backward(last=last):
            LateWeights.finish(left)

    def send_gradients(self, role: str) -> None:
        """Begins to sum the gradients of a half that has no backward left in the step."""
        self._engines[role].send_gradients()

    def end_step(self) -> None:
        """No forward or backward is left in the step: what was kept for them is dropped, and features are on disk."""
        self._casts.clear()
        self._kept.flush()

    def _fetched(self, packed: _Packed) -> _Packed:
        """A microbatch or an encoder batch on this device, for which the computing stream waits."""
        with self._inputs.copying():
            there = packed.to(self.device, non_blocking=True)
        self._inputs.hand_over(there.tensors)
        return there

    def _checked_width(self, features: tuple[Tensor, ...], modality: str, returned: str) -> tuple[Tensor, ...]:
        """Rows that others read, for which bytes were reserved by what was found at first."""
        expected = self.specs.get(modality)
        if expected is None or expected.describes(features):
            return features
        found, rows = FeatureSpec.of(features), [features[0].shape[0]]
        if found.entry_nbytes(rows) > expected.entry_nbytes(rows):
            raise ValueError(
                f"{self._name}.{returned} of {found}, but of {expected} when it was tried before the "
                "first step, in evaluation mode, to reserve bytes for them. Return as many tensors, as wide and of the "
                "same type, in training and in evaluation."
            )
        return features

    def _ends_in(self, role: str, chunk: int) -> bool:
        """Whether a chunk of what this rank holds of a half has its last blocks."""
        return role not in self._stages or self._stages[role].ends_in(chunk)

    def _place(self, role: str, chunk: int) -> tuple[int, ...]:
        """Names the random stream of blocks that are not the first of a half, in which masks would recur else."""
        first = self._stages[role].first_block(chunk) if role in self._stages else 0
        return (first,) if first else ()

    def _through(self, role: str, chunk: int, hidden: Tensor | None, method: Callable[..., Any], *inputs: Any) -> Any:
        """Runs a method of the user's on a half, or on the stage of it that this rank holds; see `StageStep`."""
        if role not in self._stages:
            return self._call(role, method, *inputs)
        return self._call(role, self._stages[role], chunk, hidden, *inputs)

    def _call(self, role: str, method: Callable[..., Any], *inputs: Any) -> Any:
        """Runs a method of the user's on one half."""
        try:
            with self._casts.kept() if role in self._keeps_casts else _NOTHING:
                return self._engines[role].call(method, *inputs)
        except RuntimeError as error:
            sentence = self._explained(role, str(error))
            if sentence == str(error):
                raise
            raise RuntimeError(sentence) from error

    def _explained(self, role: str, error: str) -> str:
        """Explains errors about weights without values, which are on other ranks, and of features written in place."""
        if "leaf Variable that requires grad" in error:
            return f"{error} It may be features, which `merge` must not change: `x = 2 * x`, not `x.mul_(2)`."
        absent = [name for name, parameter in self._module.named_parameters() if parameter.is_meta]
        if not absent or not re.search(r"\bmeta\b", error):
            return error
        if (stage := self._module.held_stages.get(role)) is not None:
            return f"{error} {where_stages_look(self._name, stage)}"
        return (
            f"What {self._name} computes on {role} ranks uses weights that other ranks hold, such as "
            f"{absent[0]!r}: {error} Encode with the encoder half alone and do all else with the backbone half; "
            "`halves` says which modules these are."
        )
