"""Probes fill shares of the budget with real samples, few long ones and many short ones."""

import numpy as np
import pytest

from flowtrain_lightning.data import IndexConfig, TokenSteps
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.placement.probes import choose_sets, load_probes
from tests.tiny import tiny_data, write_records


def sizes_of(tokens, media=None):
    tokens = np.asarray(tokens)
    counts = np.zeros(len(tokens), dtype=np.int64) if media is None else np.asarray(media)
    ones = np.ones(counts.sum(), dtype=np.int64)
    return SampleSizes(tokens, tokens, np.concatenate([[0], np.cumsum(counts)]), ones, 4 * ones)


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def test_sets_fill_an_eighth_to_all_of_the_budget(draw):
    tokens = np.arange(10, 200)
    sums = [tokens[chosen].sum() for chosen in choose_sets(sizes_of(tokens), 800, draw)]
    assert max(sums) <= 800
    assert max(sums) > 600
    assert min(sums) <= 100


def test_sets_of_like_size_are_made_of_few_long_samples_and_of_many_short_ones(draw):
    tokens = np.arange(10, 200)
    full = [chosen for chosen in choose_sets(sizes_of(tokens), 800, draw) if tokens[chosen].sum() > 600]
    counts = [len(chosen) for chosen in full]
    assert max(counts) > 5 * min(counts)


def test_some_sets_are_of_samples_with_media_however_rare_these_are(draw):
    media = np.zeros(500, dtype=np.int64)
    media[[17, 230]] = 1
    sets = list(choose_sets(sizes_of(np.full(500, 50), media), 800, draw))
    assert sum(bool(media[chosen].all()) for chosen in sets) >= 4


def test_a_sample_that_alone_is_more_than_the_smallest_share_is_taken_alone(draw):
    assert all(len(chosen) == 1 for chosen in choose_sets(sizes_of([90, 70, 80]), 100, draw))


def test_probes_are_microbatches_and_what_they_read(tmp_path):
    write_records(tmp_path, 48)
    probes = load_probes(tiny_data(tmp_path))
    assert len(probes) >= 16
    for probe in probes:
        assert probe.packed.tokens.numel() == probe.lengths("backbone").sum()
        assert bool(probe.media) == (len(probe.lengths("encoder")) > 0)
        assert not probe.media or probe.media["encoder"].patches.shape[0] == probe.lengths("encoder").sum()


def test_samples_as_long_as_the_budget_are_probes_too(tmp_path):
    write_records(tmp_path, 48)
    probes = load_probes(tiny_data(tmp_path, token_budget=40, index=IndexConfig(too_long="truncate")))
    assert {int(probe.lengths("backbone").sum()) for probe in probes} >= {40}


def test_probes_are_the_same_for_the_same_seed(tmp_path):
    write_records(tmp_path, 48)
    first, again, other = (
        [probe.batch.plan.samples.tolist() for probe in load_probes(tiny_data(tmp_path, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_probes_are_drawn_alike_where_steps_count_microbatches(tmp_path):
    write_records(tmp_path, 48)
    by_tokens = tiny_data(tmp_path, token_steps=TokenSteps(4))
    assert len(load_probes(by_tokens)) == len(load_probes(tiny_data(tmp_path)))
