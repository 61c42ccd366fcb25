"""What a module tells other ranks, whose step is many microbatches: logged in each, agreed on at the step's end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flowtrain_lightning.compute.step_metrics import MetricAccumulator, StepReport


@dataclass
class _LoggingPlace:
    """The place from which ``log`` is called now; apart from the module, whose own attributes are slow to set.

    A context, made once: what was set before it is entered holds inside.

    Attributes:
        metrics: of the microbatch that runs; None outside of microbatches.
        refused_in: what runs instead, in which nothing can be logged.
    """

    metrics: MetricAccumulator | None = None
    refused_in: str | None = None

    def __enter__(self) -> None:
        """Nothing more; who opens the context has said already what is so inside."""

    def __exit__(self, *_: object) -> None:
        """From here on ``log`` is Lightning's."""
        self.metrics = self.refused_in = None


class StepLogging(L.LightningModule):
    """A LightningModule whose ``log`` may be called in a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self._logging = _LoggingPlace()

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gathers as Lightning does, between steps.

        Raises:
            RuntimeError: it is called in a microbatch or an encoder batch, and there are other ranks.
        """
        self.refuse_in_a_batch("all_gather", self.trainer.world_size)
        return super().all_gather(data, group, sync_grads)

    def refuse_in_a_batch(self, what: str, ranks: int) -> None:
        """Raises where a method of the user's works on one batch, of which other ranks have another number.

        Args:
            what: all ranks would have to call.
            ranks: how many there are.

        Raises:
            RuntimeError: says what to do.
        """
        place = self._logging
        if ranks > 1 and (place.metrics is not None or place.refused_in is not None):
            raise RuntimeError(
                f"`{what}` was called in a method that works on one microbatch or encoder batch, such as `encode`, "
                "`merge` or `loss`. Other ranks run other methods then, or have fewer batches, and would never come to "
                "it. Call it in a hook, which all ranks run between steps; a loss sees the samples of its microbatch."
            )

    def agree_on_logged(self, name: str, value: Any) -> Any:
        """Returns the value that all ranks log outside of microbatches; here each its own."""
        return value

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Logs as Lightning does; inside a microbatch, the token-weighted mean over the whole step.

        Outside of microbatches, as in ``on_validation_epoch_end``, every rank calls it with the same names in the same
        order, and the values of backbone ranks count: with ``sync_dist=True`` their mean (or sum, minimum, maximum, by
        ``reduce_fx``), otherwise rank 0's. Over an epoch, each such call weighs alike unless ``batch_size`` is given.

        Raises:
            RuntimeError: in `encode` and in predictions, where other ranks cannot hear it.
        """
        if self._logging.refused_in is not None:
            raise RuntimeError(
                f"log({name!r}) was called in {self._logging.refused_in}, where other ranks cannot hear it in time. "
                "Log in `merge`, `loss` or `backbone_step` instead."
            )
        if self._logging.metrics is not None:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
            self._logging.metrics.record(name, value, dict(zip(names, args, strict=False)) | kwargs)
        else:
            if not kwargs.get("rank_zero_only"):
                agreed = self.agree_on_logged(name, value)
                value = value if kwargs.get("sync_dist") else agreed
            if kwargs.get("batch_size") is None:  # as `log_dict` gives it: Lightning would look for one in the batch
                kwargs["batch_size"] = 1
            super().log(name, value, *args, **kwargs)

    def logging_into(self, metrics: MetricAccumulator) -> AbstractContextManager[None]:
        """Inside, ``log`` collects into ``metrics``."""
        self._logging.metrics = metrics
        return self._logging

    def logging_refused(self, where: str) -> AbstractContextManager[None]:
        """Inside, ``log`` raises."""
        self._logging.refused_in = where
        return self._logging

    def log_report(self, stage: str, report: StepReport) -> Tensor:
        """Logs what all ranks agreed on, alike on every rank, and returns the mean loss, on the host.

        There it has been read to already: whoever took these numbers to a device would wait for it, once for each. Over
        an epoch a step's loss weighs as many tokens as it has, and none where it has none; another value as many as
        those of the microbatches that logged it.
        """
        # At least float32: under precision="bf16-true" the default dtype keeps three digits.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        loss = torch.tensor(report.loss, dtype=dtype, device="cpu")
        whole = f"{stage}_loss"
        values = {whole: report.loss, **report.values}
        for role, (mean, count) in report.losses.items():
            super().log(f"{stage}_{role}_loss", loss.new_tensor(mean), batch_size=_weight(count), sync_dist=False)
        for name, value in values.items():
            options = {"prog_bar": True} if name not in report.options else dict(report.options[name])
            weight = _weight(report.tokens if name == whole else report.weights[name])
            options |= {"batch_size": weight, "sync_dist": False, "rank_zero_only": False}
            if weight:
                super().log(name, loss.new_tensor(value), **options)
        return loss


def _weight(tokens: float) -> Any:
    """Tokens as Lightning weighs a step: a whole number, or what a loss with weights of its own has counted."""
    return int(tokens) if tokens == int(tokens) else tokens
