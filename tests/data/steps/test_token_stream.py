"""Steps of a number of microbatches lose no sample, and are the same wherever they are asked for."""

import json

import numpy as np
import pytest

from flowtrain_lightning.data import Sampling
from flowtrain_lightning.data.steps.token_stream import TokenStream, saved_stream, stream_state
from flowtrain_lightning.packing import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamState

BUDGET, MICROBATCHES = 64, 4


def tokens_of(samples):
    return np.random.default_rng(0).integers(3, 30, samples)


def stream_of(*lengths, group=2, shuffle=True, weights=None, start=None, cost=DEFAULT_COST, max_delay=4):
    sampling = Sampling(lengths, 1, seed=5, shuffle=shuffle, weights=weights)
    settings = StreamSettings(
        token_budget=BUDGET, microbatches=MICROBATCHES, balance_group=group, cost=cost, max_delay=max_delay
    )
    return TokenStream(sampling, tokens_of(sum(lengths)), settings, start)


def positions(stream, epochs, first=0):
    """The positions in the stream of the samples of each step."""
    steps = [(epoch, step) for epoch in range(epochs) for step in range(stream.steps)]
    return [stream.step(*step).samples.tolist() for step in steps[first:]]


def test_an_epoch_has_the_steps_that_one_pass_fills():
    stream = stream_of(150, 50)
    whole = tokens_of(200).sum()
    assert stream.steps == pytest.approx(whole / (MICROBATCHES * BUDGET), abs=1.5)
    seen = np.concatenate(positions(stream, 1))
    assert 0.9 < len(set(stream.samples(seen).tolist())) / 200 <= 1


def test_over_the_epochs_no_sample_is_lost_or_taken_twice():
    stream = stream_of(150, 50)
    taken = sorted(position for step in positions(stream, 6) for position in step)
    assert len(set(taken)) == len(taken)
    missing = sorted(set(range(taken[-1])) - set(taken))
    assert set(missing) <= {*stream.state.waiting, *range(stream.state.next_sample - 200, taken[-1])}
    assert len(missing) < 40
    samples = stream.samples(np.arange(600))
    assert all(sorted(samples[epoch * 200 : epoch * 200 + 200]) == list(range(200)) for epoch in range(3))


def test_no_sample_waits_longer_than_allowed():
    stream = stream_of(150, 50, max_delay=4)
    delays = [stream.step(epoch, step).delay.max() for epoch in range(4) for step in range(stream.steps)]
    assert max(delays) <= 4


def test_any_step_may_be_asked_for_and_is_always_the_same():
    whole = positions(stream_of(200), 3)
    stream = stream_of(200)
    for number in (5, 6, 2, 30, 0, 31, 31):
        epoch, step = divmod(number, stream.steps)
        assert stream.step(epoch, step).samples.tolist() == whole[number]


@pytest.mark.parametrize("done", [0, 1, 7, 22])
def test_a_saved_state_goes_on_with_the_same_steps(done):
    first = stream_of(200)
    whole = positions(first, 2)
    first = stream_of(200)
    for number in range(done):
        first.step(*divmod(number, first.steps))
    state = stream_state(json.loads(json.dumps(saved_stream(first.state))))
    second = stream_of(200, start=state)
    assert positions(second, 2, first=done) == whole[done:]
    assert positions(stream_of(200, start=state), 2) == whole


def test_unshuffled_every_epoch_is_the_same():
    stream = stream_of(200, shuffle=False)
    found = positions(stream, 2)
    assert found[: stream.steps] == found[stream.steps :]
    assert found != positions(stream_of(200), 2)


def test_weights_decide_how_much_an_epoch_has_of_each_source():
    stream = stream_of(100, 100, weights=(0.75, 0.25))
    samples = stream.samples(np.concatenate(positions(stream, 4)))
    assert np.mean(samples < 100) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_length_of_an_epoch_does_not_depend_on_the_balance_group(group):
    assert stream_of(200, group=group).steps == stream_of(200).steps


def test_too_few_samples_for_one_step_make_an_epoch_of_none():
    assert stream_of(5).steps == 0


def test_settings_that_are_not_set_are_those_of_the_checkpoint():
    cost = CostModel(1.0, 0.5, 0.25)
    saved, state = stream_of(200, group=4, cost=cost).state_dict(), StreamState()
    assert json.loads(json.dumps(saved)) == saved
    assert stream_of(200).resumed_from(saved, state, {"cost", "balance_group"}).state_dict() == saved
    assert stream_of(200).resumed_from(saved, state, set()).state_dict() == stream_of(200).state_dict()
    other_number = {**saved, "microbatches": 8, "balance_group": 8}
    kept = stream_of(200).resumed_from(other_number, state, {"balance_group"})
    assert kept.state_dict()["balance_group"] == 2
