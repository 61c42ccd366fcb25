"""The size of a step and of its encoder batches in ``flowtrain plan`` and ``simulate``: as in training, or named."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf

import numpy as np

from flowtrain_lightning.allocator import PlanningError, Workload
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.sample_stream import usual_microbatches

_MOST_SAMPLES = 100_000
"""Of a step: some minutes' work."""


def add_step_size(parser: argparse.ArgumentParser) -> None:
    """Adds ``--encoder-budget``, and ``--batch`` and ``--microbatches``, of which one can be given."""
    parser.add_argument(
        "--encoder-budget",
        type=int,
        default=ENCODER_BUDGET,
        metavar="PATCHES",
        help="the most patches of an encoder batch (default: %(default)s)",
    )
    parser.add_argument(
        "--group-by",
        choices=["media"],
        help="samples of one media item in one step, as with FlowDataModule(group_by='media'); the data say in "
        "image_content … which are the same",
    )
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
        PlanningError: a number below 1 or of more samples than can be played, or samples are to be grouped that have
            nothing in common.
    """
    if options.group_by is not None:
        if not any(len(np.unique(numbers)) < len(numbers) for numbers in workload.content.values()):
            raise PlanningError(
                "--group-by media brings samples of one media item into one step, but the data name no two that are "
                "the same: give a column such as 'image_content', with equal numbers for equal media items, or leave "
                "it out."
            )
        workload = replace(workload, together=True)
    if options.batch is not None:
        return _playable(replace(workload, global_batch_size=options.batch))
    tokens = inf if is_assumed else float(workload.tokens.sum())
    wanted = options.microbatches
    filled = usual_microbatches(tokens, workload.token_budget) if wanted is None else wanted
    return _playable(workload.filling(filled))


def _playable(workload: Workload) -> Workload:
    if workload.global_batch_size > _MOST_SAMPLES:
        raise PlanningError(
            f"A step would have {workload.global_batch_size:,} samples, more than the {_MOST_SAMPLES:,} that can be "
            "played; lower --batch, --microbatches or the token budget."
        )
    return workload
