"""The benchmark of the order within a step."""

from __future__ import annotations

import pytest

from benchmarks.flow import HEAD, gaps
from benchmarks.packing_data import FOLDER, TABLES, load

pytestmark = pytest.mark.skipif(
    not all((FOLDER / f"{table}.parquet").exists() for table in TABLES), reason=f"no length files in {FOLDER}"
)


@pytest.fixture(scope="module")
def mixes():
    return [load("qwen", TABLES, 6000, 16_384)]


@pytest.mark.parametrize("encoder_ranks", [1, 8])
def test_with_eight_microbatches_a_rank_little_time_is_lost(mixes, encoder_ranks):
    found = gaps(mixes, 8, encoder_ranks)
    assert found["this project"] <= 2
    assert found["this project"] < found["poor first and last"] < found["as packed"]


def test_no_order_is_faster_than_the_bound(mixes):
    found = gaps(mixes, 4, 2)
    assert all(found[name] >= found["its bound"] - 0.1 for name in HEAD[3:7])
    assert found["this project"] < 0.8 * found["poor first and last"]
