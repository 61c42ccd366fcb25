"""The coefficients of the models of time: what was fitted, and how far predictions are off.

Everything that is a number and no law of arithmetic stands here or with a `Device`. ``benchmarks/fit_planner.py`` fits
what `FITTED` names on published step times, and prints the errors on models and devices that it left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from flowtrain_lightning.allocator.devices import LAUNCH, Device


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peaks that one role's work reaches: fitted to published steps, or to a profile.

    Attributes:
        dense: share of the peak FLOP/s, by a large matrix product.
        attention: share of the peak FLOP/s, by fused attention over long sequences with heads that fill its tiles.
        memory: share of the memory bandwidth, by norms, sums and activations of eager code, if each read its inputs
            and wrote its result once.
        update: share of the memory bandwidth, by the optimizer, if it read and wrote each number once.
        exchange: share of links and network, by collectives.
        contention: seconds by which a second of hidden exchange slows the computing that hides it; both want memory.
        jitter: standard deviation of a device's time for the same work, as a share of it. Ranks in lockstep wait for
            the slowest.
        launch: seconds that starting an operation takes, by the host. Where kernels are shorter than that, starting
            them is what takes the time.
    """

    dense: float
    attention: float
    memory: float
    update: float
    exchange: float
    contention: float
    jitter: float
    launch: float = LAUNCH


@dataclass(frozen=True)
class Coefficients:
    """The shares that `FITTED` names: fitted on all devices together.

    Attributes:
        dense_reached: of the best matrix product that was measured on a device alone, what training sustains.
        attention_reached: of fused attention's rate in its authors' measurements, what training sustains.
        memory: see `Efficiency`.
        exchange: see `Efficiency`.
        contention: see `Efficiency`.
        jitter: see `Efficiency`.
    """

    dense_reached: float = 0.95
    attention_reached: float = 0.55
    memory: float = 0.41
    exchange: float = 0.68
    contention: float = 0.77
    jitter: float = 0.006


FITTED = tuple(field.name for field in fields(Coefficients))
"""The coefficients that ``benchmarks/fit_planner.py`` fits."""

COEFFICIENTS = Coefficients()
"""The fitted ones: on 114 step times of MPT-760M to MPT-70B on 8 to 512 A100 and H100 (llm-foundry's table,
mosaicml/llm-foundry, ``scripts/train/benchmarking``)."""

PLANNED = replace(COEFFICIENTS, attention_reached=COEFFICIENTS.dense_reached)
"""Those of plans: the fitted ones, but for attention. That of 96 rows is FlashAttention written in Triton
(``--attn_impl`` in ``submit_benchmarks.py`` there), than which FlashAttention-2 is 1.3 to 2.5 times faster (arXiv
2307.08691, section 4.1); that the fit finds 1 / 0.55 agrees. The 18 rows of 128 devices and more ran FlashAttention-2
(``sweep.py``) on 2,048 tokens, and do not: left out of the fit, they are 8 % too short with this and 2 % without.
Papers with longer sequences do (``benchmarks/unseen_papers.py``). Training here takes FlashAttention-2 or a newer
kernel, which is assumed to fall short of its authors' measurements as matrix products do of theirs."""


ROW_BAND = (-0.10, 0.09)
"""Logarithm of predicted over published that 80 % of the same rows have where neither their model nor their device was
fitted: the residuals that ``benchmarks/fit_planner.py`` prints last."""

WIDENING: Mapping[str, tuple[float, float]] = {
    "another code base": (0.12, 0.20),
    "another device": (0.08, 0.08),
    "tensor or context ranks": (0.10, 0.10),
    "a pipeline": (0.10, 0.12),
    "a mixture of experts": (0.12, 0.25),
    "fp8": (0.10, 0.12),
    "an encoder": (0.12, 0.36),
    "roles on devices of their own": (0.08, 0.08),
}
"""Features that no row covers -> how far they widen the band towards shorter and longer steps, as logarithms; assumed.

All rows are of one code base's dense language models, sharded over data-parallel ranks. What a model of time leaves out
makes steps longer: unfused code, padding, waiting. That is most where pictures are: towers run eagerly on short
sequences, loaders decode, and samples are padded where they are not packed. Published steps with pictures ask for half
of that: with 0.17 bands hold as much of each paper of ``benchmarks/unseen_papers.py`` as with 0.36. But their code is
fused. Of mixtures bands hold less than they should, 46 % of those in bf16 and 73 % of those in fp8
(``benchmarks/published_mixtures.py``): what these are longer by is how long hosts take, which nobody publishes."""

FITTED_DEVICES = ("a100", "h100")
"""Devices of the rows."""


def assumed_efficiency(device: Device, coefficients: Coefficients = PLANNED) -> Efficiency:
    """The device's own shares of its peaks, as far as training sustains them."""
    return Efficiency(
        dense=device.dense * coefficients.dense_reached,
        attention=min(1.0, device.attention * coefficients.attention_reached),
        memory=coefficients.memory,
        update=coefficients.memory,
        exchange=coefficients.exchange,
        contention=coefficients.contention,
        jitter=coefficients.jitter,
        launch=device.launch,
    )
