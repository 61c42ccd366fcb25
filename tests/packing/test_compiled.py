"""Compiled loops and plain ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """if True:
    import sys
    if {without}:
        sys.modules["numba"] = None
    import numpy as np
    from flowtrain_lightning.packing import CostModel
    from flowtrain_lightning.packing.flowing import flow_rows
    from flowtrain_lightning.packing.microbatches import pack_microbatches
    from flowtrain_lightning.packing.stream import StreamPacker, StreamSettings
    lengths = np.minimum(np.random.default_rng(0).lognormal(2, 1, 1500).astype(np.int64) + 1, 200)
    cost = CostModel(1.0, 1 / 300, 0.0)
    for step in StreamPacker(StreamSettings(200, 4, 2, cost), lambda start, end: lengths[start:end]):
        print(step.step, step.samples.tolist(), step.bin_of.tolist())
    for sync_every in ("microbatch", "step"):
        packed = pack_microbatches(lengths[:9], ranks=2, token_budget=200, cost=cost, sync_every=sync_every)
        print([[m.tolist() for m in of_rank] for of_rank in packed])
        short = np.arange(200) % 37 + 3
        encoder = np.where(np.arange(200) % 7 > 1, 0.7 * short, 0.0)
        shape = dict(rows=6, ranks=2, encoder_ranks=2, budget=500, sync_every=sync_every)
        print(flow_rows(np.arange(200) % 12, short, cost.of_each(short), encoder, **shape).tolist())
"""


def test_plans_are_the_same_with_and_without_numba():
    pytest.importorskip("numba")
    with_numba, without = (
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(without=without)],
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        ).stdout
        for without in (False, True)
    )
    assert len(with_numba) > 1000
    assert with_numba == without


COUNTING = """if True:
    import numpy as np
    from flowtrain_lightning.packing.compiled import tell_of_compiling
    from flowtrain_lightning.packing.grouping import fitting_count
    tell_of_compiling(lambda sentence: print("another one is asked to tell"))
    tell_of_compiling(print)
    fitting_count(np.arange(9), 3, 20)
"""


def test_that_loops_are_compiled_is_told_once_and_not_where_they_lie_on_the_disk(tmp_path):
    pytest.importorskip("numba")
    first, second = (
        subprocess.run(
            [sys.executable, "-c", COUNTING],
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        ).stdout
        for _ in range(2)
    )
    assert (
        first
        == "flowtrain: numba compiles the packer's inner loops, once on this machine; that takes about a minute.\n"
    )
    assert second == ""
