"""Compiles the packer's loops for the tests, ``python -m tests.compiling``; numba keeps them beside the source."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from flowtrain_lightning.packing import SYNC_EVERY, CostModel
from flowtrain_lightning.packing.compiled import announce_compilation, compile_at_once
from flowtrain_lightning.packing.offline import OfflineSettings, warm_up


def main() -> None:
    """Pack a little in every way."""
    announce_compilation(partial(print, flush=True))
    compile_at_once()
    tiny = OfflineSettings(64, 2, CostModel(1.0, 0.01, 0.0), 2, encoder_ranks=2)
    for size, sync_every in itertools.product(({}, {"microbatches": None, "global_batch_size": 64}), SYNC_EVERY):
        warm_up(replace(tiny, sync_every=sync_every, **size))


if __name__ == "__main__":
    main()
