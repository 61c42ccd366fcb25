"""An interleaved pipeline that is played chunk by chunk takes what the closed form says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.interleaved import even_cuts, optimus_idle, optimus_played, order, played
from benchmarks.published import optimus_systems
from benchmarks.published_figures import OPTIMUS_IDLE


@pytest.mark.parametrize("chunks", [1, 2, 12])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_of_equal_chunks_a_step_takes_the_microbatches_and_a_share_of_the_stages(chunks, microbatches):
    stages = 8
    forward, backward = [1.0 / chunks] * (stages * chunks), [2.0 / chunks] * (stages * chunks)
    seconds = played(forward, backward, stages, microbatches, hop=0.0)
    assert seconds == pytest.approx(3.0 * (microbatches + (stages - 1) / chunks))
    assert played(forward, backward, stages, microbatches, hop=0.01) > seconds


def test_a_stage_does_every_chunk_of_every_microbatch_once_forward_and_once_backward():
    for stage in range(4):
        works = order(stage, 4, 3, 8)
        assert len(works) == len(set(works)) == 2 * 3 * 8
        for work in works:
            if not work.forward:
                there = next(one for one in works if one.forward and one.chunk == work.chunk)
                assert works.index(there) < works.index(work)


def test_layers_are_cut_where_parts_differ_least():
    assert even_cuts(np.array([1.0, 1.0, 2.0, 2.0]), 3).tolist() == [0, 2, 3, 4]
    assert even_cuts(np.ones(9), 3).tolist() == [0, 3, 6, 9]


def test_with_whole_layers_and_sending_the_closed_form_holds_within_4_percent():
    for gpus in (1536, 3072):
        assert optimus_played(gpus, 12, 4e-4) == pytest.approx(optimus_systems(gpus)["Megatron-LM balanced"], rel=0.04)


def test_data_ranks_wait_for_each_other_as_long_as_is_printed():
    assert optimus_idle()["among data ranks"] == pytest.approx(OPTIMUS_IDLE["among data ranks"], abs=0.03)
    assert optimus_idle()["among tensor ranks"] > OPTIMUS_IDLE["among tensor ranks"]
