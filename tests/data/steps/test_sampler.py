"""Which samples are in which step: every sample in its turn, alike on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.data import Sampling
from flowtrain_lightning.data.steps.sampler import epoch_order


def order(epoch, *lengths, **settings):
    return epoch_order(Sampling(lengths, 2, **settings), epoch).tolist()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 5), st.integers(0, 2**40))
def test_an_epoch_without_weights_has_every_sample_once(lengths, epoch, seed):
    assert sorted(order(epoch, *lengths, seed=seed)) == list(range(sum(lengths)))


def test_the_order_depends_on_seed_and_epoch_alone():
    assert order(1, 9, 7, seed=5) == order(1, 9, 7, seed=5)
    different = [order(epoch, 9, 7, seed=seed) for epoch in (0, 1) for seed in (0, 1)]
    assert len({tuple(each) for each in different}) == 4


def test_the_order_is_the_same_on_every_machine_and_version():
    assert order(0, 8, seed=1) == [5, 6, 3, 0, 7, 2, 1, 4]
    assert order(3, 3, 4, seed=2) == [1, 3, 6, 2, 0, 4, 5]


def test_steps_cut_the_order_and_the_tail_is_dropped_or_kept():
    dropped, kept = Sampling((7,), 3, drop_last=True), Sampling((7,), 3)
    assert (dropped.steps, kept.steps) == (2, 3)
    assert [len(kept.step(0, step)) for step in range(3)] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([kept.step(0, step) for step in range(3)]), epoch_order(kept, 0))
    assert Sampling((6,), 3).steps == 2


def test_other_samples_fall_out_with_the_tail_each_epoch():
    sampling = Sampling((7,), 3, drop_last=True)
    left_out = [
        set(range(7)) - {int(sample) for step in range(2) for sample in sampling.step(epoch, step)}
        for epoch in range(20)
    ]
    assert set.union(*left_out) == set(range(7))


def test_weights_decide_the_shares_of_an_epoch():
    assert Sampling((10, 10), 2, weights=(0.7, 0.3)).shares == (14, 6)
    assert Sampling((10, 1), 2, weights=(1, 1)).shares == (6, 5)
    assert Sampling((1, 1, 1), 2, weights=(1, 1, 0)).shares == (2, 1, 0)
    mixed = np.array(order(0, 10, 10, weights=(0.7, 0.3)))
    assert np.count_nonzero(mixed < 10) == 14


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 9, allow_subnormal=False)), min_size=1, max_size=4).filter(
        lambda sources: sum(weight for _, weight in sources) > 0
    )
)
def test_shares_always_fill_the_epoch_exactly(sources):
    sampling = Sampling(tuple(length for length, _ in sources), 2, weights=tuple(weight for _, weight in sources))
    assert sum(sampling.shares) == sum(sampling.lengths)
    assert min(sampling.shares) >= 0
    assert len(epoch_order(sampling, 1)) == sum(sampling.lengths)


def test_a_source_starts_again_only_when_it_has_run_out():
    sampling = Sampling((4, 6), 2, weights=(0.7, 0.3))
    small = np.concatenate([epoch_order(sampling, epoch)[epoch_order(sampling, epoch) < 4] for epoch in range(4)])
    assert len(small) == 28
    # In what order an epoch mixes its samples is another draw, so whole epochs are counted, not prefixes.
    counts = [np.bincount(small[: 7 * epochs], minlength=4) for epochs in range(1, 5)]
    assert all(count.max() - count.min() <= 1 for count in counts)


def test_a_large_source_is_read_on_through_the_epochs():
    sampling = Sampling((90, 10), 2, weights=(0.1, 0.9))
    read = [set(order(epoch, 90, 10, weights=(0.1, 0.9))) - set(range(90, 100)) for epoch in range(9)]
    assert sampling.shares == (10, 90)
    assert set.union(*read) == set(range(90))


def test_unshuffled_epochs_are_all_the_same_and_mix_evenly():
    assert order(0, 5, shuffle=False) == order(3, 5, shuffle=False) == [0, 1, 2, 3, 4]
    assert order(2, 4, 2, shuffle=False) == [0, 4, 1, 2, 5, 3]
    assert order(1, 2, 2, weights=(3, 1), shuffle=False) == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"weights": (1.0, -1.0)}, "none below 0"),
        ({"weights": (0.0, 0.0)}, "one above"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**({"lengths": (3, 3), "global_batch_size": 2} | change))
