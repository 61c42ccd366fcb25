"""Steps of which nothing is said: planned as a data module of which nothing is said makes them."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from flowtrain_lightning.allocator import ROLES, Allocation, Layout, PlanningError, Workload
from flowtrain_lightning.cli.plan_step_size import add_step_size, in_steps
from flowtrain_lightning.data.steps.token_stream import TokenStream
from flowtrain_lightning.placement.drawn_steps import steps_of
from tests.data.support import data_module, write_set

ALONE = Allocation("colocated", dict.fromkeys(ROLES, Layout()), dict.fromkeys(ROLES, (0,)))


def asked(*arguments):
    """What a command of these arguments was asked for."""
    parser = argparse.ArgumentParser()
    add_step_size(parser)
    return parser.parse_args(arguments)


def test_a_plan_counts_on_the_steps_that_a_data_module_makes_of_the_same_samples(tmp_path):
    data = data_module(write_set(tmp_path / "t.jsonl", 300), global_batch_size=None)
    data.setup("fit")
    trained = data.train_dataloader().steps
    assert isinstance(trained.sampling, TokenStream)
    sizes = trained.samples.source.sizes(np.arange(300))
    workload = Workload(sizes.tokens, {"image": sizes.media_patches}, token_budget=data.token_budget)
    workload = in_steps(workload, asked(), is_assumed=False)
    planned = steps_of(workload, sizes)
    assert planned.settings == trained.sampling.settings
    assert workload.global_batch_size == trained.sampling.samples_per_step
    expected, found = trained.plan(0, 0), planned.packed(ALONE)[0]
    assert len(found.microbatches[0]) == len(expected.microbatches[0]) == workload.microbatches
    assert found.sizes.tokens.sum() > 0.9 * expected.sizes.tokens.sum()


def test_a_number_of_samples_or_of_microbatches_is_that_of_a_step():
    workload = Workload(np.full(100, 50), {}, token_budget=500)
    assert in_steps(workload, asked("--batch", "24"), is_assumed=False).microbatches is None
    assert in_steps(workload, asked("--batch", "24"), is_assumed=False).global_batch_size == 24
    assert in_steps(workload, asked("--microbatches", "6"), is_assumed=False).microbatches == 6


@pytest.mark.parametrize("size", [("--batch", "100001"), ("--microbatches", "20000")], ids=" ".join)
def test_more_samples_than_can_be_played_are_refused(size):
    workload = Workload(np.full(100, 50), {}, token_budget=500)
    with pytest.raises(PlanningError, match=r"A step would have .* more than the 100,000 that can"):
        in_steps(workload, asked(*size), is_assumed=False)
