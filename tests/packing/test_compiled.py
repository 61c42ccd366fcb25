"""Compiled loops and plain ones."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

SCRIPT = """if True:
    import sys
    if {without}:
        sys.modules["numba"] = None
    import numpy as np
    from flowtrain_lightning.packing import CostModel
    from flowtrain_lightning.packing.microbatches import pack_microbatches
    from flowtrain_lightning.packing.order import order_step
    from flowtrain_lightning.packing.sample_stream import StreamSettings
    from flowtrain_lightning.packing.stream_packer import StreamPacker
    cost = CostModel(1.0, 1 / 300, 0.0)
    settings = StreamSettings(token_budget=200, microbatches=16, balance_group=8, cost=cost)
    for mean, count in ((2, 1500), (4, 300)):  # many and few samples in a microbatch
        lengths = np.minimum(np.random.default_rng(0).lognormal(mean, 1, count).astype(np.int64) + 1, 200)
        for step in StreamPacker(settings, lambda start, end: lengths[start:end]):
            print(step.step, step.samples.tolist(), step.bin_of.tolist())
    for sync_every in ("microbatch", "step"):
        packed = pack_microbatches(lengths[:9], ranks=2, token_budget=200, cost=cost, sync_every=sync_every)
        print([[m.tolist() for m in of_rank] for of_rank in packed])
        short = np.arange(200) % 37 + 3
        encoder = np.where(np.arange(200) % 7 > 1, 0.7 * short, 0.0)
        step = dict(positions=6, ranks=2, encoder_ranks=2, budget=500, sync_every=sync_every)
        print(order_step(np.arange(200) % 12, short, cost.of_each(short), encoder, **step).tolist())
"""


def test_plans_are_the_same_with_and_without_numba():
    pytest.importorskip("numba")
    command = [sys.executable, "-c", SCRIPT.format(without=True)]
    without = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    with redirect_stdout(io.StringIO()) as with_numba:
        exec(SCRIPT.format(without=False), {})
    assert len(without) > 1000
    assert with_numba.getvalue() == without


ANNOUNCING = """if True:
    import numpy as np
    from flowtrain_lightning.packing.compiled import announce_compilation, compile_at_once
    from flowtrain_lightning.packing.simulator import closed_form_time
    announce_compilation(lambda sentence: print("the announcement of the earlier call"))
    announce_compilation(print)
    compile_at_once()
    closed_form_time(np.arange(2), np.ones((2, 1)), np.ones(2, {kind}))
"""


LITTLE = """if True:
    import sys
    import numpy as np
    from flowtrain_lightning.packing import CostModel
    from flowtrain_lightning.packing.microbatches import pack_microbatches
    pack_microbatches(np.arange(1, 33), ranks=2, token_budget=64, cost=CostModel(1.0, 0.0, 0.0), sync_every="step")
    print("numba" in sys.modules)
"""


def test_a_process_that_packs_little_does_not_even_import_numba():
    command = [sys.executable, "-c", LITTLE]
    assert subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout == "False\n"


def test_where_numba_is_told_not_to_compile_loops_run_as_they_are():
    command, told = [sys.executable, "-c", ANNOUNCING.format(kind="float")], {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=told)
    assert done.stdout == ""


@pytest.mark.full
def test_compilation_is_announced_once_and_not_where_the_cache_has_some_of_the_loops(tmp_path):
    pytest.importorskip("numba")
    first, second, of_another_loop = (
        subprocess.run(
            [sys.executable, "-c", ANNOUNCING.format(kind=kind)],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        ).stdout
        for kind in ("float", "float", "int")
    )
    assert (
        first
        == "flowtrain: numba compiles the packer's inner loops, once on this machine; that takes about a minute.\n"
    )
    assert second == of_another_loop == ""
