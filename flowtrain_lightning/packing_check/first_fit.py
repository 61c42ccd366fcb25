"""The packing check of a run: on rank 0, before the first fit of a module, unless an earlier start has passed it."""

from __future__ import annotations

import site
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.packing_check.check import CheckReport, check_packing
from flowtrain_lightning.packing_check.findings import Finding, Kind, divided, refuse
from flowtrain_lightning.packing_check.kept_results import KeptResults, Result

_NOT_THE_USERS = (str(Path(__file__).parents[1]), *site.getsitepackages())


def check_before_fit(module: Any, trainer: L.Trainer, couples: Collection[str]) -> None:
    """Checks the module on rank 0, and refuses it on every rank alike. Every rank calls it.

    What only some samples run is noted in the module, and which weights are needed elsewhere than where they stand,
    for layouts that cannot have that.

    Args:
        module: a `FlowModule`, before it is built or after.
        trainer: has module and data attached.
        couples: what may couple samples, see `Coupling`.

    Raises:
        PackingCheckError: packing changes what the module learns, in a way that is not named.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if trainer.state.fn != TrainerFn.FITTING or not isinstance(data, FlowDataModule) or "train" not in data.files:
        return
    found = _found(module, data, trainer) if trainer.global_rank == 0 else Result()
    told: list[tuple[Kind, str]] = [(each.kind, each.sentence) for each in found.findings]
    found_of_weights = list(found.conditional), list(found.needed_weights)
    told, (conditional, needed) = trainer.strategy.broadcast((told, found_of_weights))
    module.conditional_modules, module.needed_weights = tuple(conditional), tuple(needed)
    unnamed, named = divided([Finding(kind, sentence) for kind, sentence in told], couples)
    for finding in named:
        rank_zero_info(f"flowtrain: samples are coupled, as couples says. {finding.sentence}")
    refuse(type(module).__name__, unnamed)


def _found(module: Any, data: FlowDataModule, trainer: L.Trainer) -> Result:
    kept = KeptResults.of(module, data)
    if (known := kept.read()) is not None:
        return known
    try:
        report = check_packing(module, data.apart(), trainer)
    except Exception as error:  # whatever it is, the run itself will say so where it matters
        _tell_unproven(module, f"the check ended with {type(error).__name__}{_place(error)}: {error}.")
        return Result()
    for reason in report.unproven:
        _tell_unproven(module, reason)
    result = Result(tuple(report.findings), tuple(report.conditional), tuple(report.needed_weights))
    if not report.unproven:  # else the next start would say nothing
        kept.write(result)
    _tell(report)
    return result


def _tell_unproven(module: Any, reason: str) -> None:
    rank_zero_warn(
        f"flowtrain: NOTHING IS PROVEN of whether {type(module).__name__} learns from packed samples what it learns "
        f"from each alone: {reason} Training goes on; flowtrain_lightning.check(module, data) and `flowtrain check` "
        "say more."
    )


def _place(error: Exception) -> str:
    """Names the place at which an error was raised: the last line of the user's own code."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in raised if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _tell(report: CheckReport) -> None:
    for hint in report.hints:
        rank_zero_info(f"flowtrain: {hint}")
    if not report.findings and not report.unproven:
        precision = str(report.dtype).removeprefix("torch.")
        rank_zero_info(
            f"flowtrain: packed equals alone: {report.samples} samples with {report.media} media items give the same "
            f"loss and gradients together as one by one ({report.seconds:.1f} s on {report.device} in {precision})."
        )
