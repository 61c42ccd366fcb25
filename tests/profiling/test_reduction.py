import multiprocessing
import time

import pytest

from flowtrain_lightning.profiling import ProfileError
from flowtrain_lightning.profiling.reduction import measure_reduction


def test_summing_more_takes_longer_and_leaves_no_process():
    reduction = measure_reduction()
    assert reduction.ranks == 2
    assert 0 < reduction.seconds(1 << 20) < reduction.seconds(1 << 28)
    assert not multiprocessing.active_children()


def test_ranks_that_take_too_long_are_ended_with_a_sentence():
    start = time.monotonic()
    with pytest.raises(ProfileError, match=r"did not sum gradients: they failed, or took more than 0\.01 s"):
        measure_reduction(deadline=0.01)
    assert time.monotonic() - start < 10
    assert not multiprocessing.active_children()
