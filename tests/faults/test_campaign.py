"""The first trials of the campaign; `make campaign` runs a thousand."""

import pytest

from tests.faults.trial import draw, run_trial, why_impossible

LONG = 66


@pytest.mark.full
@pytest.mark.parametrize("seed", range(LONG))
def test_a_random_fault_is_told_and_the_job_goes_on_bit_for_bit(seed, tmp_path):
    trial = draw(seed)
    if reason := why_impossible(trial):
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    run_trial(trial, tmp_path)


def test_a_trial_is_the_same_whenever_it_is_drawn():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({str(draw(seed)).partition(":")[2] for seed in range(1000)}) > 500
