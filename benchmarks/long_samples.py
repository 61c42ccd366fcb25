"""A step of one long sample, on four ranks that share its tokens, or leave it to one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulated_records import emulated_data, write_records
from benchmarks.laid_out import LaidOutJob
from benchmarks.layout_cells import run_job
from benchmarks.stretched_costs import StretchedCosts, packing_by
from flowtrain_lightning.allocator import (
    BACKBONE,
    ENCODER,
    Allocation,
    Cluster,
    Layout,
    Workload,
    named_device,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import given_plan
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts

MODEL, DEVICE, BACKBONE_RANKS = "qwen2.5-vl-7b", "h100", 4
TOKENS = 8192
_SIDE = 32  # of the image, in rows of features
_TEMPLATE_ROOM = 64  # tokens of the chat template, at most
_STRETCH = 2.0


def measure_long(context: int, folder: Path, quick: bool) -> dict[str, Any]:
    """One run.

    Args:
        context: ranks that share the sample; the others have nothing to do.
        folder: where data and results go.
        quick: short steps.
    """
    tokens = _write_sample(folder)
    module = named_model(MODEL).with_frozen("encoder")
    patches = np.array([4 * _SIDE**2])
    workload = Workload(np.array([tokens]), {"image": patches}, global_batch_size=1, token_budget=TOKENS)
    problems = role_problems(module, workload, Cluster(named_device(DEVICE), BACKBONE_RANKS + 1, 8))
    layouts = {
        ENCODER: Layout(data=1),
        BACKBONE: Layout(data=BACKBONE_RANKS // context, context=context, shard="fsdp"),
    }
    ranks = {BACKBONE: tuple(range(BACKBONE_RANKS)), ENCODER: (BACKBONE_RANKS,)}
    allocation = Allocation("separate", layouts, ranks)
    costs, stretch = ModelledLayoutCosts(problems, allocation), 0.1 if quick else _STRETCH
    job = LaidOutJob(
        allocation=allocation,
        costs=StretchedCosts(costs, stretch, costs.encoder_trains),
        packing=packing_by(costs, problems),
        encoder_first=False,
        data=folder,
        folder=folder / "run",
        global_batch_size=1,
        token_budget=TOKENS,
        warmup=2,
        steps=2 if quick else 10,
        step_bytes=0,
    )
    job.folder.mkdir()
    planned = given_plan(problems, allocation).seconds
    what = (
        f"A step is one sample of {tokens:,} tokens, {_SIDE**2:,} of them of an image; {MODEL}, tower frozen, on "
        f"{DEVICE}: the backbone in shards over {BACKBONE_RANKS} ranks, the encoder on one more."
    )
    return {**run_job(job), "stretch": stretch, "predicted": planned, "what": what}


def _write_sample(folder: Path) -> int:
    """Records of one image and a text that fills the rest; returns the tokens of each."""
    words = TOKENS - _SIDE**2 - _TEMPLATE_ROOM  # a word is a token
    sides = np.array([[_SIDE, _SIDE]])
    write_records(folder, 32, sides=sides, pictures={1: 1.0}, words=(words, words + 1))
    data = emulated_data(folder, 1, TOKENS)
    data.setup("fit")
    return int(data.train_dataloader().steps.samples.source.sizes(np.arange(1)).tokens[0])
