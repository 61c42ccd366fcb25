"""How near answers come to the true ones."""

from __future__ import annotations

import pytest

from flowtrain_lightning.metrics import AnswerExactMatch, AnswerSimilarity


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "similarity"),
    [
        ("red car", "Red car ", 1.0, 1.0),
        ("red cat", "red car", 0.0, 1 - 1 / 7),
        ("blue", "red car", 0.0, 0.0),
        ("abcd", "abxy", 0.0, 0.0),
        ("", "", 1.0, 1.0),
    ],
)
def test_slips_of_spelling_cost_little_and_other_words_all(answer, truth, exact, similarity):
    for metric, score in ((AnswerExactMatch(), exact), (AnswerSimilarity(), similarity)):
        metric.update([answer, truth], [truth, truth])
        assert metric.compute().item() == pytest.approx((score + 1) / 2)
