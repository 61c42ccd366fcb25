"""The packing check: what a module learns from packed samples is the sum of what it learns from each alone."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.data import DataError, FlowDataModule
from flowtrain_lightning.packing_check import findings as say
from flowtrain_lightning.packing_check.checked_module import (
    WHOLE,
    NotCheckable,
    checked_copy,
    default_dtype,
    freeze_batch_norms,
)
from flowtrain_lightning.packing_check.conditional_modules import conditional_modules
from flowtrain_lightning.packing_check.course import Course
from flowtrain_lightning.packing_check.diagnosis import backbone_finding, encoder_finding, label_findings
from flowtrain_lightning.packing_check.dispatch_modes import InFloat64
from flowtrain_lightning.packing_check.findings import BACKBONE, ENCODE, Finding, Method
from flowtrain_lightning.packing_check.machine import CPU, made_on, many_threads, memory_given_back
from flowtrain_lightning.packing_check.media_parts import parts_finding
from flowtrain_lightning.packing_check.needed_weights import NeededWeight, unlikely_needs
from flowtrain_lightning.packing_check.passes import FeaturesOfItems, Pass, Passes
from flowtrain_lightning.packing_check.random_draws import kept_random_states
from flowtrain_lightning.packing_check.rounding import EXACT
from flowtrain_lightning.packing_check.samples import CheckedSamples, Item, load_samples
from flowtrain_lightning.packing_check.twins import HasTwin

T = TypeVar("T")

_OWN_KERNELS = 1e-5
"""Relative error that attention by other kernels may make, some of which compute in float32 whatever they are given."""
_PADDING = 8
"""Tokens of padding behind a microbatch, where the data module adds some."""


@dataclass
class CheckReport:
    """The findings of a check.

    Attributes:
        samples: how many samples were packed together.
        media: how many media items.
        findings: ways in which packing changes the result.
        hints: sentences on what may be meant so.
        unproven: sentences on why no difference means nothing.
        conditional: paths of modules with weights that some samples run and others do not.
        needed_weights: weights outside of the backbone's blocks that are needed elsewhere than where they stand.
        device: that computed.
        dtype: in which; float32 where the module takes no float64, with tolerances to match.
        seconds: that it took.
    """

    samples: int
    media: int
    device: torch.device
    dtype: torch.dtype
    findings: list[Finding] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    conditional: list[str] = field(default_factory=list)
    needed_weights: list[NeededWeight] = field(default_factory=list)
    seconds: float = 0.0


def check_packing(module: Any, data: FlowDataModule, trainer: L.Trainer) -> CheckReport:
    """Compares samples that are packed with the same samples one by one: features, loss, count and every gradient.

    It runs the user's methods on a copy, in float64 (in float32 where they take nothing else), with a few real samples,
    or on its twin with samples of its own where it has one: in both orders, and each a second time, so that what is
    kept between calls shows. It computes on the Trainer's GPU,
    and on the CPU where there is none, or too little room, or no kernel for float64.

    Args:
        module: a `FlowModule`, built or not.
        data: belongs to no Trainer; has training data.
        trainer: whose device computes; the copy may ask it for settings.

    Raises:
        NotCheckable: the module does not fit into memory, even with fewer blocks.
        DataError: the training data cannot be read.
        Exception: whatever the user's methods raise for one sample alone.
    """
    start = time.perf_counter()
    twin = module.checked_twin() if isinstance(module, HasTwin) else None
    module, samples, known = twin or (module, None, ())
    try:
        report = _report_of(module, samples or data, trainer, start)
    except Exception:
        if not known:
            raise
        report = CheckReport(0, 0, CPU, torch.float64)  # it is refused, whatever else there is to say
    report.findings += known
    return report


def _report_of(module: Any, data: FlowDataModule | CheckedSamples, trainer: L.Trainer, start: float) -> CheckReport:
    device = trainer.strategy.root_device
    with kept_random_states(), made_on(CPU):
        if device.type == "cuda":
            with memory_given_back(), suppress(Exception):  # whatever it is, it is raised on the CPU too, or is not
                return _report(module, data, trainer, torch.float64, device, start)
        try:
            return _report(module, data, trainer, torch.float64, CPU, start)
        except (NotCheckable, DataError):
            raise
        except Exception:  # such as of an operation that takes float32 alone; what else it is, comes again
            return _report(module, data, trainer, torch.float32, CPU, start)


def _report(
    module: Any,
    data: FlowDataModule | CheckedSamples,
    trainer: L.Trainer,
    dtype: torch.dtype,
    device: torch.device,
    start: float,
) -> CheckReport:
    """Checks a copy in one precision on one device."""
    copied = checked_copy(module, trainer, dtype, device)
    weights = sum(weight.numel() for weight in copied.parameters())
    samples = data if isinstance(data, CheckedSamples) else load_samples(data, weights)
    report = CheckReport(len(samples.samples), len(samples.media), device, dtype)
    report.findings += _of_batch_norms(copied, freeze_batch_norms(copied))
    passes = Passes(copied, samples, dtype, _padding_of(data), device)
    features: FeaturesOfItems = {}
    with ExitStack() as inside:
        if weights > WHOLE:
            rank_zero_info(say.TAKES_LONG.format(module=type(module).__name__, weights=weights / 1e6, device=device))
            inside.enter_context(many_threads())
        inside.enter_context(default_dtype(dtype))
        inside.enter_context(torch.enable_grad())
        inside.enter_context(torch.autocast(device.type, enabled=False))
        if dtype == torch.float64:
            inside.enter_context(InFloat64())  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:  # which takes seconds to import, and has compiled nothing where it is not
            inside.enter_context(torch.compiler.set_stance("force_eager"))
        for modality in samples.modalities:
            _check_encoder(passes, modality, items := samples.of_modality(modality), features, report)
            if copied.encodes_parts_apart and not any(finding.kind == "random" for finding in report.findings):
                report.findings += filter(None, [parts_finding(passes, items, features)])
        _check_backbone(passes, range(len(samples.samples)), features, report)
        with suppress(Exception):  # they are told of where training meets them
            report.conditional = conditional_modules(passes, samples, features)
        with suppress(Exception):
            report.needed_weights = unlikely_needs(passes, features)
    report.seconds = time.perf_counter() - start
    return report


def _padding_of(data: FlowDataModule | CheckedSamples) -> int:
    return _PADDING if isinstance(data, CheckedSamples) or data.packing.pad_to_budget else 0


def _check_encoder(
    passes: Passes, modality: str, items: Sequence[Item], features: FeaturesOfItems, report: CheckReport
) -> None:
    """Checks `encode`, and leaves in ``features`` what it gives for each item alone: its last pass."""

    def run(of_module: Passes, groups: Sequence[Sequence[Item]]) -> Pass:
        found, of_items = of_module.encode(modality, groups)
        if of_module is passes:
            features.update(of_items)
        return found

    course = Course(passes, run, items, ENCODE)
    course.run()
    report.findings += course.findings
    report.unproven += _of_no_numbers(course, ENCODE)
    if (difference := course.difference) is not None:
        with course.draws:
            report.findings.append(
                _explained(
                    lambda: encoder_finding(passes, modality, items, difference),
                    Finding("encode", say.ENCODE_DIFFERS.format(difference=difference)),
                )
            )


def _check_backbone(passes: Passes, members: Sequence[int], features: FeaturesOfItems, report: CheckReport) -> None:
    """Checks `merge`, the backbone and `loss`, with the features that came of each media item alone."""
    course = Course(passes, lambda of_module, groups: of_module.backbone(groups, features), members, BACKBONE)
    course.run()
    report.findings += course.findings
    report.unproven += _of_no_numbers(course, BACKBONE)
    with course.draws:
        by_itself = _by_itself(passes, members, features, report)
        if by_itself is not None and (unlike := course.compare(by_itself, least=_OWN_KERNELS)) is not None:
            report.findings.append(
                Finding("backbone", say.NOT_ITS_OWN.format(difference=replace(unlike, other="by itself")))
            )
    alone, packed = course.alone, course.packed
    if not alone.magnitude and not any(gradient.any() for gradient in alone.gradients.values()):
        report.unproven.append(say.NOTHING_LEARNED.format(samples=len(members)))
    if packed is None:
        return
    counts = [count for _, count in alone.losses]
    are_counts = all(math.isfinite(count) and count >= 0 for count in counts)  # the step refuses what is no count
    if are_counts and abs(packed.count - alone.count) > EXACT * max(1.0, alone.count):
        together = f"{len(members)} samples"
        sentence = say.COUNT.format(packed=packed.count, alone=alone.count, together=together)
        report.findings.append(Finding("count", sentence))
    with course.draws:
        nothing: tuple[list[Finding], list[str]] = ([], [])
        signs, hints = _explained(lambda: label_findings(passes, members, features), nothing)
        report.findings += signs
        report.hints += hints
        if (difference := course.difference) is not None:
            mean = _is_mean(alone, packed, course.tolerance)
            report.findings.append(
                Finding("sum", say.MEAN.format(difference=difference))
                if mean
                else _explained(
                    lambda: backbone_finding(passes, members, features, difference, course.tolerance),
                    Finding("backbone", say.SOMETHING_COUPLES.format(difference=difference)),
                )
            )


def _of_no_numbers(course: Course[Any], method: Method) -> list[str]:
    if not course.numberless:
        return []
    first, *others = course.numberless
    names = first if not others else f"{first} and {len(others)} more"
    return [say.NO_NUMBERS_ALONE.format(method=method.name, items=method.items, names=names)]


def _explained(explain: Callable[[], T], otherwise: T) -> T:
    """Diagnoses by changing samples. The user's methods may refuse them; the difference stands all the same."""
    try:
        return explain()
    except Exception:
        return otherwise


def _by_itself(passes: Passes, members: Sequence[int], features: FeaturesOfItems, report: CheckReport) -> Pass | None:
    """Each sample as it was computed before packing; None where that is nothing else, or cannot be told."""
    try:
        return passes.alone(members, features)
    except TypeError as error:  # it takes other features than encode gives
        report.findings.append(Finding("backbone", f"merge or backbone: {error}"))
    except Exception as error:
        report.hints.append(say.NOT_COMPARED.format(error=f"{type(error).__name__}: {error}"))
    return None


def _is_mean(alone: Pass, packed: Pass, tolerance: float) -> bool:
    """Whether a loss is what it should be, divided by its own count."""
    parts = [loss * count for loss, count in alone.losses]
    scale = sum(map(abs, parts))
    return packed.count > 1 and scale > 0 and abs(packed.loss * packed.count - sum(parts)) <= tolerance * scale


def _of_batch_norms(module: Any, names: Sequence[str]) -> list[Finding]:
    if not names:
        return []
    encoders = [path for role in module.role_graph.producers for path in module.halves[role]]
    inside = [any(name.startswith(f"{path}.") for path in encoders) for name in names]
    method = ENCODE.name if all(inside) else BACKBONE.name if not any(inside) else f"{ENCODE.name}, {BACKBONE.name}"
    more = f" and {len(names) - 1} more normalise" if len(names) > 1 else " normalises"
    layers = f"{names[0]} ({type(module.get_submodule(names[0])).__name__}){more}"
    return [Finding("batch_norm", say.BATCH_NORM.format(method=method, layers=layers))]
