"""A plan divides layers among tensor ranks: what each holds, and which plans are refused."""

from __future__ import annotations

import re

import pytest

from tests.forks import Job, read_down, run_jobs

SENTENCES = {
    "nothing of that name": r"names 'half.layer.\*.widen', but the half has no such module",
    "an unknown style": "'half.scores' the style 'diagonal'; known are colwise, rowwise",
    "another kind of module": "'half.words' the style 'colwise', but it is Embedding, no Linear",
    "an odd width": "'half.odd' has out_features 3, which 2 tensor ranks cannot divide evenly",
    "a part of a key head": "'half.attention.k_proj.weight' makes 1 key and value heads, which 2 tensor ranks cannot",
    "all tokens where none are divided": "the layer that it is part of has no style 'divided_tokens'",
    "a head where tokens are divided": "a layer of divided tokens, which can have 'colwise' and 'rowwise' layers only",
    "one of two that are tied": "Embedding and Linear share one weight, but tensor_plan divides it in one of them only",
}


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """What each of two ranks found."""
    job = Job("divide", "tests.parallel.tensor_jobs:divide", 2)
    return read_down(run_jobs(tmp_path_factory.mktemp("divided"), [job])["divide"].check().folder)


def test_ranks_hold_shares_of_layers_and_compute_what_the_whole_does(divided):
    for found in divided:
        assert found["held"] == [6 * 4 / 2, 8 * 4 / 2]
        assert found["is tied"]
        assert found["stays frozen"]
        assert found["summed"] == 0
        assert found["error"] < 1e-14


def test_the_gradient_of_a_head_without_target_tokens_is_divided_as_its_weight(divided):
    for found in divided:
        assert found["gradient of no rows"] == 6 * 4 / 2


def test_between_divided_layers_each_rank_has_a_share_of_any_number_of_tokens(divided):
    for found, shares in zip(divided, ([3, 4, 1], [3, 3, 0]), strict=True):
        assert found["of tokens"]["shares"][:3] == shares
        assert max(found["of tokens"]["errors"]) < 1e-14
        assert found["of tokens"]["summed"] == 2 * len(("norm.weight", "norm.bias"))


def test_a_sum_over_tensor_ranks_becomes_a_gather_before_and_a_scatter_after(divided):
    layers, behind_them = 2, 1
    for found in divided:
        sent = found["of tokens"]["sent"]
        assert sent["reduce_scatter_tensor"] == layers
        assert sent["all_gather_into_tensor"] == layers + behind_them + len(("scores",))
        assert sent["all_reduce"] == len(("words",))


def test_tokens_are_gathered_in_the_precision_in_which_layers_compute(divided):
    assert all(found["of tokens"]["dtypes"] == ["torch.bfloat16"] for found in divided)


def test_plans_that_cannot_be_followed_are_refused(divided):
    for found in divided:
        for name, sentence in SENTENCES.items():
            assert re.search(sentence, found[name]), found[name]
