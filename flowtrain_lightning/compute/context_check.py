"""Context ranks must compute what one rank computes alone: compared in the first steps of a run, by values.

Whatever looks at other tokens without asking the other ranks gives another gradient: attention that is not
`varlen_attention`, a convolution or a norm across tokens, positions that were not sliced. So a piece of the first
microbatch is run shared, and whole on every rank, and the gradient of each weight is compared. The bound comes from the
module itself: it is run whole a second time with every layer's output changed by a rounding error. What autocast would
round to bfloat16, in which a small mixture is no more than rounding, is computed in float32 where the module can.

Trials leave nothing behind: not gradients, logged values, buffers, random streams or the modules' mode. Gradients of
two runs are subtracted as they accumulate, so no copy of them is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook

from flowtrain_lightning.allocator import BACKBONE
from flowtrain_lightning.compute.context_loss import LossInParts
from flowtrain_lightning.compute.context_piece import cut
from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.parallel.context_parallel import ContextParallelHalf
from flowtrain_lightning.parallel.ranks.random_streams import enter_stream, random_states, restore_random_states

STEPS = 2
"""That are looked at: what a module keeps between calls shows in the second one."""

_LEAST_TOKENS = 256
_TIMES_ROUNDING = 3.0
_MANY = 64  # elements whose norm says how large rounding is


class ContextError(ValueError):
    """Context ranks compute something else than one rank would."""


Stepping = Callable[[PackedBatch, Features], tuple[Tensor, Any]]
"""One microbatch, whose logged values are lost -> the summed loss and number of target tokens."""


@dataclass(frozen=True)
class _Trial:
    """The results of running a piece once.

    Attributes:
        loss: summed.
        tokens: how many targets it says it has.
        features: gradients of the features, in order.
    """

    loss: float
    tokens: float
    features: list[Tensor]


class ContextCheck:
    """Compares what context ranks compute together with what each of them computes alone.

    Args:
        step: the user's.
        half: modules of the backbone.
        engine: of the backbone.
        loss: the user's, by itself.
        kept: keeps what else of the module a trial could change, behind it as it was.
    """

    def __init__(
        self,
        step: Stepping,
        half: Sequence[nn.Module],
        engine: ContextParallelHalf,
        loss: LossInParts,
        kept: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._step = step
        self._engine = engine
        self._half = half
        self._loss = loss
        self._kept = kept
        self._steps_left = STEPS
        self._reached = False  # attention has come to the exchange of heads

    def look(self, batch: PackedBatch, features: Features) -> None:
        """Before the first microbatch of a training step, on all ranks that run it.

        Args:
            batch: the microbatch; without samples where it is there for the other ranks only.
            features: of it.

        Raises:
            ContextError: names the weight whose gradient differs most, by how much, and what to do; or says that the
                loss is no sum over tokens.
        """
        if self._steps_left == 0:
            return
        self._steps_left -= 1  # whatever comes of it, so that all ranks look equally often
        ranks = self._engine.exchange.ranks
        kind = batch.tokens.device.type
        rounds = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        most = len(batch.tokens) // ranks // (2 if rounds else 1)  # float32 takes twice the room
        piece, given = cut(batch, features, max(most, _LEAST_TOKENS))
        states = random_states()
        with (
            self._kept(),
            _evaluating(self._half),
            _kept_buffers(self._half),
            self._engine.on_trial(),
            ExitStack() as precise,
        ):
            if rounds and self._runs_in_float32(piece, given, kind):
                precise.enter_context(torch.autocast(kind, enabled=False))
                given = _in_float32(given)
            with self._loss.noting(len(piece.tokens)):
                found = self._differences(piece, given, 1.0 if batch.samples else 0.0)
            of_loss = self._of_parts(piece.tokens.device)
        restore_random_states(states)
        if of_loss:
            raise ContextError(of_loss)
        if found:
            raise ContextError(self._sentence(found))

    def _runs_in_float32(self, piece: PackedBatch, given: Features, kind: str) -> bool:
        """Whether the half also runs without autocast, as its ranks agree; FSDP2 gathers weights in bfloat16 anyway."""
        if any(isinstance(part, FSDPModule) for module in self._half for part in module.modules()):
            return False
        runs = torch.ones((), device=piece.tokens.device)
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            try:
                self._engine.trial(lambda: self._step(piece, _in_float32(given))[0], 1.0, whole=True)
            except Exception:  # it casts to a type of its own, or its kernels take no float32; other errors come again
                runs.zero_()
        dist.all_reduce(runs, dist.ReduceOp.MIN, group=self._engine.exchange.group)
        return bool(runs)

    def _differences(self, piece: PackedBatch, given: Features, factor: float) -> dict[str, tuple[float, float]]:
        """Returns name -> difference, and its change by rounding, both relative, of all that differs.

        The whole runs on every context rank, so that each counts for its share.
        """
        engine = self._engine
        share = factor / engine.exchange.ranks
        with _rounded_otherwise() as coarsest:
            other = self._run(piece, given, share, "other rounding", whole=True)
        norms = engine.trial_norms()
        whole = self._run(piece, given, -share, "whole", whole=True)
        rounding = engine.trial_norms()
        for parameter in engine.parameters:
            parameter.grad = None
        self._run(piece, given, share, "whole", whole=True)
        calls = engine.exchange.calls
        shared = self._run(piece, given, -factor, "whole", whole=False)
        self._reached = engine.exchange.calls > calls
        differences = engine.summed_trial_norms()
        names = {id(parameter): name for name, parameter in engine.names.items()}
        paths = [f"the gradient of {names.get(id(parameter), 'a weight')!r}" for parameter in engine.parameters]
        measured = dict(zip(paths, zip(*map(Tensor.tolist, (norms, rounding, differences)), strict=True), strict=True))
        measured |= self._of_features(other, whole, shared)
        counts = [parameter.numel() for parameter in engine.parameters] + [each.numel() for each in whole.features]
        total = math.hypot(*(norm for norm, _, _ in measured.values()))
        if total == 0 or not math.isfinite(total):
            return {}
        of_rounding = math.hypot(*(changed for _, changed, _ in measured.values()))
        error = coarsest()
        found = {}
        for (name, (norm, changed, difference)), count in zip(measured.items(), counts, strict=True):
            slack = error * norm + 0.1 * of_rounding
            if count < _MANY:  # such a norm is a matter of chance
                slack += _TIMES_ROUNDING * norm * of_rounding / total + of_rounding
            if difference > _TIMES_ROUNDING * changed + slack:
                scale = max(norm, 1e-6 * total)
                found[name] = difference / scale, changed / scale
        found |= self._of_loss(other, whole, shared, error, piece.tokens.device)
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def _of_features(self, *trials: _Trial) -> dict[str, tuple[float, float, float]]:
        """Norm, change by rounding and difference of the gradients of the features."""
        found = {}
        for number, (other, whole, shared) in enumerate(zip(*(trial.features for trial in trials), strict=True)):
            measures = (other, other - whole, whole - shared)
            norm, changed, difference = (float(torch.linalg.vector_norm(each.double())) for each in measures)
            found[f"the gradient of tensor {number} of the features"] = norm, changed, difference
        return found

    def _of_loss(
        self, other: _Trial, whole: _Trial, shared: _Trial, error: float, device: torch.device
    ) -> dict[str, tuple[float, float]]:
        """The sum of the ranks' losses and of their target tokens, where these are not those of the whole."""
        sums = torch.tensor([shared.loss, shared.tokens], dtype=torch.float64, device=device)
        dist.all_reduce(sums, group=self._engine.exchange.group)
        loss, tokens = sums.tolist()
        found = {}
        difference, changed = abs(loss - whole.loss), abs(other.loss - whole.loss)
        if difference > _TIMES_ROUNDING * (changed + error * abs(whole.loss)):
            found["the loss"] = difference / max(abs(whole.loss), 1e-12), changed / max(abs(whole.loss), 1e-12)
        if abs(tokens - whole.tokens) > 1e-6 * abs(whole.tokens):
            found["the number of target tokens"] = abs(tokens - whole.tokens) / max(abs(whole.tokens), 1.0), 0.0
        return found

    def _of_parts(self, device: torch.device) -> str:
        """A sentence where the loss is no sum over tokens; all context ranks say it alike."""
        found = self._loss.compare(self._engine.call)
        differ = torch.tensor(float(found is not None and found.differ), device=device)
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=self._engine.exchange.group)
        if not differ or found is None:
            return ""
        return (
            f"Each of the backbone's {self._engine.exchange.ranks} context ranks takes the loss of its own tokens, but "
            f"of the same outputs `loss` gives {found.apart:.7g} in two parts and {found.whole:.7g} at once. Return a "
            "sum over tokens, in which nothing is divided by or weighed with the number of tokens or targets that "
            "`loss` is given; the step divides once, by all targets. What `couples` names may couple samples of a "
            "microbatch, but context ranks do not see all of it. Or give the backbone a layout without a context "
            "degree."
        )

    def _run(self, piece: PackedBatch, given: Features, factor: float, stream: str, *, whole: bool) -> _Trial:
        """One forward and backward; what draws random numbers draws the same ones for the same stream."""
        enter_stream(BACKBONE, "context check", stream)
        leaves = {modality: _leaves(features) for modality, features in given.items()}
        tokens = 0.0

        def forward() -> Tensor:
            nonlocal tokens
            loss, count = self._step(piece, leaves)
            tokens = float(count)
            return loss

        loss = self._engine.trial(forward, factor, whole=whole)
        tensors = [each for value in leaves.values() for each in (value if isinstance(value, tuple) else (value,))]
        scale = 1 / factor if factor else 0.0
        gradients = [scale * leaf.grad for leaf in tensors if leaf.grad is not None]
        return _Trial(float(loss), tokens, gradients)

    def _sentence(self, found: Mapping[str, tuple[float, float]]) -> str:
        name, (difference, rounding) = next(iter(found.items()))
        more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
        none = "No attention reached the exchange of heads between these ranks. " if not self._reached else ""
        ranks = self._engine.exchange.ranks
        return (
            f"The backbone's {ranks} context ranks compute something else together than one rank computes from the "
            f"same samples: {name} differs by {difference:.1e} of its norm, of which rounding explains {rounding:.0e}"
            f"{more}. {none}Each rank has some of a sequence's tokens, so whatever looks at other tokens must be "
            "`flowtrain_lightning.attention.varlen_attention`, in every layer, and `slice_tokens` must cut all that "
            "there is of each token, positions included. Convolutions, scans, norms and pooling across tokens see this "
            "rank's tokens only. Use `varlen_attention` there, or give the backbone a layout without a context degree."
        )


def _leaves(features: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    if isinstance(features, tuple):
        return tuple(each.detach().requires_grad_(each.requires_grad) for each in features)
    return features.detach().requires_grad_(features.requires_grad)


def _in_float32(features: Features) -> Features:
    def raised(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    return {
        modality: tuple(map(raised, given)) if isinstance(given, tuple) else raised(given)
        for modality, given in features.items()
    }


@contextmanager
def _rounded_otherwise() -> Iterator[Callable[[], float]]:
    """Inside, what modules return is changed by a rounding error of its type, so that all that follows rounds anew.

    Yields:
        the largest of these errors, relative, so far.
    """
    coarsest = 0.0

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal coarsest
        if type(output) is not Tensor or not output.is_floating_point():
            return None
        error = torch.finfo(output.dtype).eps
        coarsest = max(coarsest, error)
        draws = torch.rand_like(output, dtype=torch.promote_types(output.dtype, torch.float32))
        return output * (1 + error * (2 * draws - 1)).to(output.dtype)

    handle = register_module_forward_hook(change)
    try:
        yield lambda: coarsest
    finally:
        handle.remove()


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, dropout is off."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Behind it, buffers are as they were."""
    kept = [
        (owner, name, buffer, buffer.detach().clone())
        for module in modules
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, values in kept:
            if getattr(owner, name, None) is not buffer:
                setattr(owner, name, buffer)
            with torch.no_grad():
                buffer.copy_(values)
