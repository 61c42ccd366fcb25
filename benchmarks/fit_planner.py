"""Fits the planner's coefficients to published step times, and says how far off it is where it has not looked.

python -m benchmarks.fit_planner ROWS.csv            the errors of the committed coefficients: two seconds
python -m benchmarks.fit_planner ROWS.csv --fit      fit anew and cross-validate: several minutes

Cross-validation leaves whole models and whole devices out: the prediction for a row is by coefficients that have seen
neither its model nor its device. A band's coverage is by residuals of other models than the row's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published_steps import PublishedStep, log_errors, read_steps
from benchmarks.report import table
from flowtrain_lightning.allocator import Efficiency, named_device
from flowtrain_lightning.allocator.coefficients import FITTED, Coefficients, assumed_efficiency
from flowtrain_lightning.allocator.flops import FloatArray

PRIOR = {
    #                      likely  give or take, lowest, highest: what physics and other measurements allow
    "dense_reached": (0.90, 0.10, 0.60, 0.95),
    "attention_reached": (0.80, 0.20, 0.30, 1.10),
    "memory": (0.50, 0.20, 0.15, 0.90),
    "exchange": (0.75, 0.15, 0.30, 0.95),
    "contention": (0.40, 0.30, 0.00, 1.00),
    "jitter": (0.02, 0.02, 0.00, 0.06),
}
"""Coefficient -> what is assumed of it before any row is seen."""

ROW_ERROR = 0.10
"""Error of a row that weighs as much as a coefficient's departure by its ``give or take``; larger ones weigh less."""

BAND = (0.1, 0.9)
"""Quantiles that bound a band of 80 %."""


@dataclass(frozen=True)
class HeldOut:
    """Rows in an order of their own, with what coefficients that have not seen them predict.

    Attributes:
        steps: the rows.
        errors: ``[steps]`` logarithm of predicted over published.
    """

    steps: list[PublishedStep]
    errors: FloatArray

    @property
    def coverage(self) -> float:
        """Share of the rows inside of bands from the residuals of all other models."""
        inside = []
        for step, error in zip(self.steps, self.errors, strict=True):
            others = self.errors[[other.model != step.model for other in self.steps]]
            low, high = np.quantile(others, BAND)
            inside.append(low <= error <= high)
        return float(np.mean(inside))


def main() -> None:
    """Print errors, or fit and print coefficients and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a CSV file with model,device,gpus,layout,batch,seq,published_s")
    parser.add_argument("--fit", action="store_true", help="fit anew and cross-validate")
    options = parser.parse_args()
    steps = read_steps(options.rows)
    print(report("committed coefficients", steps, log_errors(steps)))
    if options.fit:
        fitted = fit(steps)
        print("\nfitted on all rows: " + ", ".join(f"{name} {getattr(fitted, name):.3f}" for name in FITTED))
        for name, keys in (("model", ("model",)), ("device", ("device",)), ("model and device", ("model", "device"))):
            found = held_out(steps, keys)
            print(f"\n{report(f'held out: {name}', found.steps, found.errors)}")
            print(f"bands of 80 % hold {100 * found.coverage:.0f} %; residuals' {BAND} quantiles ", end="")
            print(", ".join(f"{value:+.3f}" for value in np.quantile(found.errors, BAND)))
            points = 100 * np.abs(scaling_errors(found.steps, found.errors))
            print(f"throughput per device on 512 against 128 is missed by {points.max():.1f} points at most")


def efficiency(step: PublishedStep, values: Coefficients) -> Efficiency:
    """The device's shares by other coefficients."""
    return assumed_efficiency(named_device(step.device), values)


def fit(steps: Sequence[PublishedStep]) -> Coefficients:
    """The coefficients that the rows and `PRIOR` make likeliest; a few rows that are far off hardly count."""
    likely, spread, low, high = np.array([PRIOR[name] for name in FITTED]).T

    def residuals(scaled: FloatArray) -> FloatArray:
        values = low + (high - low) * scaled
        chosen = Coefficients(*values)
        errors = [np.log(step.predicted(efficiency(step, chosen)) / step.seconds) for step in steps]
        return np.concatenate([np.array(errors) / ROW_ERROR, (values - likely) / spread])

    start = (likely - low) / (high - low)
    found = least_squares(residuals, start, bounds=(0, 1), loss="soft_l1", diff_step=1e-3, xtol=1e-4, ftol=1e-4)
    return Coefficients(*(float(value) for value in low + (high - low) * found.x))


def held_out(steps: Sequence[PublishedStep], keys: tuple[str, ...]) -> HeldOut:
    """Predictions by coefficients that were fitted without the row's model, device, or both."""
    tested: list[PublishedStep] = []
    errors: list[float] = []
    for left_out in _values(steps, keys):
        test = [step for step in steps if all(getattr(step, k) == v for k, v in left_out.items())]
        train = [step for step in steps if all(getattr(step, k) != v for k, v in left_out.items())]
        values = fit(train)
        tested += test
        errors += [float(np.log(step.predicted(efficiency(step, values)) / step.seconds)) for step in test]
    return HeldOut(tested, np.array(errors))


def scaling_errors(steps: Sequence[PublishedStep], errors: FloatArray) -> FloatArray:
    """``[models]`` by how much throughput per device on 512 H100 against 128 is predicted too high."""
    found = {(step.model, step.devices): (step.seconds, error) for step, error in zip(steps, errors, strict=True)}
    differences = []
    for model, devices in found:
        if devices == 512:
            (few, few_error), (many, many_error) = found[model, 128], found[model, 512]
            differences.append(few / many * np.expm1(few_error - many_error))
    return np.array(differences)


def _values(steps: Sequence[PublishedStep], keys: tuple[str, ...]) -> Iterator[dict[str, str]]:
    for values in sorted({tuple(getattr(step, key) for key in keys) for step in steps}):
        yield dict(zip(keys, values, strict=True))


def report(title: str, steps: Sequence[PublishedStep], errors: FloatArray) -> str:
    """Median error and bias, of all rows, of each model and device, and of runs on many devices."""
    groups: dict[str, list[int]] = {"all": list(range(len(steps)))}
    for number, step in enumerate(steps):
        for name in (step.model, step.device, *(("128 devices and more",) if step.devices >= 128 else ())):
            groups.setdefault(name, []).append(number)
    lines = []
    for name, numbers in groups.items():
        relative = np.expm1(errors[numbers])
        absolute = np.abs(relative)
        figures = (np.median(absolute), np.quantile(absolute, 0.9), np.median(relative))
        lines.append([name, str(len(numbers)), *(f"{100 * figure:+.1f} %" for figure in figures)])
    return table([title, "rows", "median error", "90th percentile", "bias"], lines)


if __name__ == "__main__":
    main()
