"""The user's methods over all checked samples, grouped in one way: values, and the gradients summed over the groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.compute.checked_outputs import checked_features
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.named_losses import ReturnedLosses, loss_names, returned_losses
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia, PackedTargets
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.packing_check.machine import CPU
from flowtrain_lightning.packing_check.output_rows import output_rows
from flowtrain_lightning.packing_check.samples import CheckedSamples, Item

Step = Callable[[PackedBatch, Features, Sequence[int]], "tuple[Tensor, Any] | None"]
"""A microbatch, its features and its samples -> the summed loss and the number of its targets."""

FeaturesOfItems = dict[Item, tuple[Tensor, ...]]
"""Media item -> its rows of each of the encoder's tensors."""


@dataclass
class Pass:
    """The results of one pass.

    Attributes:
        values: name -> a tensor that must not depend on the grouping: features of an item, or gradients of an item's
            features.
        gradients: name of a weight -> its gradient, summed over the groups.
        loss: summed over the groups.
        losses: of each group, with its number of targets.
        count: targets, summed over the groups.
        magnitude: the groups' losses without their signs, summed.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    losses: list[tuple[float, float]] = field(default_factory=list)
    count: float = 0.0
    magnitude: float = 0.0

    @property
    def without_numbers(self) -> list[str]:
        """Names of the tensors that hold something that is no number, NaN or infinite."""
        tensors = {**self.values, **self.gradients}
        return [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]


@dataclass(frozen=True)
class Outputs:
    """The backbone's outputs for one microbatch.

    Attributes:
        batch: the microbatch.
        rows: ``[tokens, width]``; None where it gives no row for each token.
        gradient: ``[tokens, width]`` of the loss by these; None where it does not depend on them.
    """

    batch: PackedBatch
    rows: Tensor | None
    gradient: Tensor | None


class Passes:
    """Runs the methods of one copy of the module, again and again, as training does.

    Args:
        module: a copy that may be changed; see `checked_copy`.
        samples: what it runs on.
        dtype: of the pixels.
        padding: tokens of padding behind what is packed together, as the data module adds them.
        device: of the module.

    Attributes:
        module: see above.
        dtype: see above.
        before_call: called before every call of the user's methods.
    """

    def __init__(
        self,
        module: Any,
        samples: CheckedSamples,
        dtype: torch.dtype,
        padding: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.before_call: Callable[[], None] = lambda: None
        self._samples = samples
        self._padding = padding
        self._device = device
        self._weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}

    def on(self, module: Any) -> Passes:
        """The same passes on another copy of the module."""
        same = Passes(module, self._samples, self.dtype, self._padding, self._device)
        same.before_call = self.before_call
        return same

    def encode(
        self, modality: str, groups: Sequence[Sequence[Item]], changed: Item | None = None
    ) -> tuple[Pass, FeaturesOfItems]:
        """Encodes the media items of one modality, each group in one forward, and goes backward through each.

        Args:
            modality: of the items.
            groups: the items of each forward.
            changed: an item that shows something else than it does.
        """
        found, features = Pass(), FeaturesOfItems()
        self._forget_gradients()
        for items in groups:
            media = self._samples.encoder_batch(items, changed)
            of_items = [torch.split(tensor, list(media.rows)) for tensor in self._encoded(media)]
            features.update({item: tuple(rows[n].detach() for rows in of_items) for n, item in enumerate(items)})
            rows = [of_tensor[n] for of_tensor in of_items for n in range(len(items))]
            gradients = [_cotangent(of_tensor[n], item) for of_tensor in of_items for n, item in enumerate(items)]
            reached = [number for number, of_item in enumerate(rows) if of_item.requires_grad]
            if reached:
                torch.autograd.backward([rows[n] for n in reached], [gradients[n] for n in reached])
        for item, of_item in sorted(features.items()):
            found.values |= {f"features {level} of {_named(item)}": tensor for level, tensor in enumerate(of_item)}
        found.gradients = self._gradients()
        return found, features

    def parts_of(self, item: Item) -> int:
        """Parts of a media item that may be taken apart."""
        loaded = self._samples.loaded(item)
        return 1 if loaded.rows % loaded.parts else loaded.parts

    def encode_parts(self, items: Sequence[Item]) -> FeaturesOfItems:
        """Encodes media with each part as an item of its own, all in one forward; the rows of each whole one."""
        parts = [
            loaded.between(number, number + 1)
            for item in items
            for loaded in [self._samples.loaded(item)]
            for number in range(self.parts_of(item))
        ]
        with torch.no_grad():
            tensors = self._encoded(pack_media(parts))
        rows = [self._samples.loaded(item).rows for item in items]
        of_items = zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
        return dict(zip(items, of_items, strict=True))

    def _encoded(self, media: PackedMedia) -> tuple[Tensor, ...]:
        media = media.with_patches(_of_dtype(media.patches, self.dtype))
        media = replace(media, inputs=self.module.prepare_media(media)).to(self._device)
        self.before_call()
        with self.module.logging_refused("encode"):
            output = self.module.encode(media)
        return checked_features(output, media, type(self.module).__name__)

    def backbone(self, groups: Sequence[Sequence[int]], features: FeaturesOfItems) -> Pass:
        """Runs the backbone on the samples, each group as one microbatch, and goes backward through each."""
        found = self._over(groups, features, self._all_losses)
        assert found is not None
        return found

    def alone(self, members: Sequence[int], features: FeaturesOfItems) -> Pass | None:
        """Runs each sample by itself as it was computed before anything was changed for packing, if that differs."""

        def step(batch: PackedBatch, given: Features, _: Sequence[int]) -> tuple[Tensor, Any] | None:
            output = self.module.step_alone(batch, given)
            return None if output is None else self._returned(output, "step_alone").summed

        return self._over([[member] for member in members], features, step)

    def _over(self, groups: Sequence[Sequence[int]], features: FeaturesOfItems, step: Step) -> Pass | None:
        found = Pass()
        self._forget_gradients()
        for members in groups:
            batch = self.microbatch(members, together=len(members) > 1)
            given, leaves = self._features_of(members, features)
            if (output := step(batch, given, members)) is None:
                return None
            loss, count = output
            if loss.requires_grad:
                torch.autograd.backward(loss)
            for item, of_item in leaves.items():
                found.values |= {
                    f"the gradient of features {n} of {_named(item)}": _gradient(leaf) for n, leaf in enumerate(of_item)
                }
            value, targets = float(loss.detach()), float(count)
            found.losses.append((value, targets))
            found.loss, found.count = found.loss + value, found.count + targets
            found.magnitude += abs(value)
        found.gradients = self._gradients()
        return found

    def microbatch(self, members: Sequence[int], *, together: bool) -> PackedBatch:
        """Some of the samples as one microbatch."""
        return self._samples.microbatch(members, self._padding if together else 0).to(self._device)

    def loss_of(self, batch: PackedBatch, features: Features) -> tuple[Tensor, Any]:
        """The summed loss of a microbatch and the number of its targets.

        Raises:
            TypeError: `backbone_step` returned something else.
        """
        loss, count, _ = self._step(batch, features)
        return loss, count

    def _all_losses(self, batch: PackedBatch, features: Features, members: Sequence[int]) -> tuple[Tensor, Any]:
        """The same, and the loss of what is generated from its outputs: the items of these samples in one forward."""
        loss, count, rows = self._step(batch, features)
        if not batch.generated:
            return loss, count
        media = self._samples.targets(members)
        items = PackedTargets(media.with_patches(_of_dtype(media.patches, self.dtype)), 0, 0, 0).to(self._device)
        self.before_call()
        with self.module.logging_into(MetricAccumulator()):
            (condition,) = rows
            generated, values = self.module.generator_loss(items, condition)
        return loss + generated.reshape(()), count + values

    def _step(self, batch: PackedBatch, features: Features) -> tuple[Tensor, Any, tuple[Any, ...]]:
        """Runs `backbone_step` on a microbatch: the loss, the number of its targets, and rows that others read."""
        self.before_call()
        with self.module.logging_into(MetricAccumulator()):
            output = self.module.backbone_step(batch, features, "train")
        returned = self._returned(output, "loss (or backbone_step)")
        return *returned.summed, returned.rest

    def _returned(self, output: Any, method: str) -> ReturnedLosses:
        """Reads the losses that a method returned."""
        named = f"{type(self.module).__name__}.{method}"
        return returned_losses(output, loss_names(self.module), named, more=bool(self.module.role_graph.behind))

    @torch.no_grad()
    def loss_alone(self, member: int, features: FeaturesOfItems, batch: PackedBatch) -> float:
        """The loss of one sample, whose tokens and labels may have been changed."""
        return float(self.loss_of(batch, self._features_of([member], features)[0])[0])

    def run_with_all_modalities(self, member: int, features: FeaturesOfItems) -> None:
        """Runs one sample's backbone step forward, with features of no rows for what it has no media of."""
        given, _ = self._features_of([member], features)
        for modality in self._samples.modalities:
            if modality not in given:
                of_item = features[self._samples.of_modality(modality)[0]]
                given |= as_features(modality, tuple(rows[:0] for rows in of_item))
        self.loss_of(self.microbatch([member], together=False), given)

    def outputs(self, members: Sequence[int], features: FeaturesOfItems, batch: PackedBatch | None = None) -> Outputs:
        """The backbone's outputs for one microbatch, a row for each token, and the gradient of the loss by them.

        Args:
            members: the samples.
            features: of the media items.
            batch: in place of the samples' own microbatch, of as many tokens.
        """
        batch = batch or self.microbatch(members, together=len(members) > 1)
        given, _ = self._features_of(members, features)
        rows: list[Tensor] = []
        with _watched_outputs(self.module, len(batch.tokens), rows):
            loss, _ = self.loss_of(batch, given)
        if not rows:
            return Outputs(batch, None, None)
        gradient = None
        if loss.requires_grad and rows[-1].requires_grad:
            (gradient,) = torch.autograd.grad(loss, rows[-1], allow_unused=True)
        found = rows[-1].detach()
        shape = (len(batch.tokens), -1)
        return Outputs(batch, found.reshape(shape), None if gradient is None else gradient.reshape(shape))

    def _features_of(
        self, members: Sequence[int], features: FeaturesOfItems
    ) -> tuple[Features, dict[Item, tuple[Tensor, ...]]]:
        """The features that ``merge`` gets, and the leaves that they are made of."""
        given: Features = {}
        leaves: dict[Item, tuple[Tensor, ...]] = {}
        for modality in self._samples.modalities:
            own = self._samples.of_modality(modality)
            items = [item for member in members for item in own if item[0] == member]
            if items:
                leaves |= {item: tuple(map(_leaf, features[item])) for item in items}
                levels = range(len(features[items[0]]))
                given |= as_features(modality, tuple(torch.cat([leaves[item][n] for item in items]) for n in levels))
        return given, leaves

    def _forget_gradients(self) -> None:
        for weight in self._weights.values():
            weight.grad = None

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
        self._forget_gradients()
        return {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in found.items()}


@contextmanager
def _watched_outputs(module: Any, tokens: int, rows: list[Tensor]) -> Iterator[None]:
    """Inside, what the user's ``loss`` is given is noted, where it has a row for each token."""
    loss = module.loss

    def noting(outputs: Any, batch: PackedBatch) -> Any:
        found = output_rows(outputs, tokens)
        rows.extend([] if found is None else [found])
        return loss(outputs, batch)

    module.loss = noting
    try:
        yield
    finally:
        del module.loss


def _named(item: Item) -> str:
    return f"media item {item[1]} of sample {item[0]}"


def _of_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _cotangent(rows: Tensor, item: Item) -> Tensor:
    """A gradient for the features of an item: the same in every pass."""
    own = torch.Generator().manual_seed(1_000_003 * item[0] + item[1])
    return torch.randn(rows.shape, generator=own, dtype=torch.float64, device=CPU).to(rows)


def relative_errors(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], floor: float = 1e-6
) -> dict[str, float]:
    """Name -> how far a tensor is from what was expected, as law 1 of exactness measures it.

    That is ``‖g − g_ref‖ / max(‖g_ref‖, floor·‖all‖)``; a tensor that is missing is zero, and one that holds something
    that is no number is infinitely far.
    """
    norms = {name: _norm(tensor) for name, tensor in expected.items()}
    whole = math.hypot(*filter(math.isfinite, norms.values()))
    errors = {}
    for name in {**expected, **found}:
        if name not in found:
            distance = norms[name]
        elif name not in expected:
            distance = _norm(found[name])
        else:
            distance = _norm(found[name] - expected[name])
        scale = max(norms.get(name, 0.0), floor * whole)
        error = distance / scale if scale > 0 else float(distance > 0)
        errors[name] = error if math.isfinite(distance) else math.inf  # NaN is above no bound
    return errors


def _norm(tensor: Tensor) -> float:
    return float((tensor if tensor.is_floating_point() else tensor.double()).norm())
