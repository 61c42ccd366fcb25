"""Whole papers that nothing was fitted to, by the coefficients of plans: ``python -m benchmarks.unseen_papers``.

Where ``benchmarks/published.py`` takes kernels to be those that a paper ran, nothing is assumed of them here: this is
how far off a plan is for code that is not the fitted rows', and how many of the times its bands hold. Only for one line
attention is that of HetPar's own code, see `benchmarks.attention_kernels`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks import published_figures as figures
from benchmarks.attention_kernels import cudnn_share
from benchmarks.printed import Prediction
from benchmarks.published import compare_hetpar, dip, hetpar, hetpar_problems, optimus, timed
from benchmarks.report import table
from flowtrain_lightning.allocator import BACKBONE, ENCODER, Layout
from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.coefficients import PLANNED
from flowtrain_lightning.allocator.modelled_plan import Band, step_band
from flowtrain_lightning.allocator.role_layout import Recompute


def papers() -> dict[str, list[Prediction]]:
    """Paper -> its times."""
    return {"Optimus": optimus(PLANNED), "DIP": dip(PLANNED), "HetPar": compare_hetpar(PLANNED)[0]}


def own_attention() -> list[Prediction]:
    """HetPar's times with the attention of its code in the language models, whose heads are of 128 numbers."""
    return compare_hetpar(PLANNED, cudnn_share(128))[0]


def share_in_bands() -> float:
    """The share of HetPar's times inside of the bands of their plans."""
    inside = []
    for result in figures.hetpar_results():
        if result.after:
            together = replace(result.shared, pipeline=1, context=1), result.shared
            apart = result.encoder_layout, result.backbone_layout
            before, after = hetpar(result, PLANNED)
            inside += [
                _holds(_band(result, *together, False), before, result.before),
                _holds(_band(result, *apart, result.mode == "NC"), after, result.after),
            ]
    return float(np.mean(inside))


def _holds(band: Band, predicted: float, printed: float) -> bool:
    return band.low <= printed / predicted <= band.high


def _band(result: figures.HetParResult, encoder: Layout, backbone: Layout, separate: bool) -> Band:
    again: Recompute = "full" if result.encoder in figures.RECOMPUTED else "none"
    module, chosen = hetpar_problems(result, PLANNED), {}
    for role, layout, recompute in ((ENCODER, encoder, again), (BACKBONE, backbone, "none")):
        time = timed(module[role], layout, recompute)
        chosen[role] = Candidate(role, layout, recompute, float(time.total[0]), 0.0, float(time.batch[0]))
    return step_band(module, chosen, separate)


def report(found: dict[str, list[Prediction]]) -> str:
    """Median error and bias of each paper, and the share in bands."""
    every = [one for times in found.values() for one in times]
    lines = [
        (paper, str(len(times)), *_errors(times))
        for paper, times in {**found, "all": every, "HetPar, its own attention": own_attention()}.items()
    ]
    shares = f"Bands of 80 % hold {100 * share_in_bands():.0f} % of HetPar's times."
    return "\n".join([table(("paper", "times", "median error", "bias"), lines), shares])


def _errors(times: Sequence[Prediction]) -> tuple[str, str]:
    errors = np.array([one.error for one in times])
    return f"{100 * np.median(np.abs(errors)):.1f} %", f"{100 * np.median(errors):+.1f} %"


def main() -> None:
    """Print the report."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(report(papers()))


if __name__ == "__main__":
    main()
