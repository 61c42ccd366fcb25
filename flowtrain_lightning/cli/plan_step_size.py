"""The size of a step in ``flowtrain plan`` and ``simulate``: the one that training takes, or one that is named."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf

from flowtrain_lightning.allocator import Workload
from flowtrain_lightning.packing.sample_stream import usual_microbatches


def add_step_size(parser: argparse.ArgumentParser) -> None:
    """Adds ``--batch`` and ``--microbatches``, of which one can be given."""
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--batch",
        "--global-batch-size",
        type=int,
        metavar="SAMPLES",
        help="steps of so many samples (default: steps that fill microbatches, as a data module makes them)",
    )
    add(
        "--microbatches",
        type=int,
        help="steps that fill so many (default: as a data module takes)",
    )


def in_steps(workload: Workload, options: argparse.Namespace, *, is_assumed: bool) -> Workload:
    """The workload in steps as the options say, or as a data module makes them of these samples.

    Args:
        workload: with the samples and the token budget.
        options: of `add_step_size`.
        is_assumed: nothing is known of the data, nor how many tokens they have.

    Raises:
        PlanningError: a number below 1.
    """
    if options.batch is not None:
        return replace(workload, global_batch_size=options.batch)
    tokens = inf if is_assumed else float(workload.tokens.sum())
    wanted = options.microbatches
    return workload.filling(usual_microbatches(tokens, workload.token_budget) if wanted is None else wanted)
