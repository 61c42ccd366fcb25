"""A plan divides layers among tensor ranks: what each holds, and which plans are refused."""

from __future__ import annotations

import re

from tests.forks import Job, read_down, run_jobs

SENTENCES = {
    "nothing of that name": r"names 'half.layer.\*.widen', but the half has no such module",
    "an unknown style": "'half.scores' the style 'diagonal'; known are colwise, rowwise",
    "another kind of module": "'half.words' the style 'colwise', but it is Embedding, no Linear",
    "an odd width": "'half.odd' has out_features 3, which 2 tensor ranks cannot divide evenly",
    "one of two that are tied": "Embedding and Linear share one weight, but tensor_plan divides it in one of them only",
}


def test_ranks_hold_shares_of_layers_and_compute_what_the_whole_does(tmp_path):
    job = Job("divide", "tests.parallel.tensor_jobs:divide", 2, deadline=120)
    for found in read_down(run_jobs(tmp_path, [job])["divide"].check().folder):
        assert found["held"] == [6 * 4 / 2, 8 * 4 / 2]
        assert found["is tied"]
        assert found["stays frozen"]
        assert found["summed"] == 0
        assert found["error"] < 1e-14
        for name, sentence in SENTENCES.items():
            assert re.search(sentence, found[name]), found[name]
