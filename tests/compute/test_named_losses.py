"""Losses that a user's method returns: one pair, or several by name, each summed over its own count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flowtrain_lightning.compute.named_losses import loss_names, returned_losses, with_rows
from flowtrain_lightning.packing.role_graph import graph_of

NAMES = ("backbone", "score")
LOSS, ERRORS, ROWS = torch.tensor(6.0), torch.tensor(4.0), torch.zeros(2, 3)
BOTH = {"score": (ERRORS, 2), "backbone": (LOSS, 3)}


@pytest.mark.parametrize(
    ("roles", "weights", "names"),
    [
        (("encoder", "backbone"), {}, ("backbone",)),
        (("encoder", "backbone"), {"score": 0.5, "aux": 0.1}, ("backbone", "aux", "score")),
        (("encoder", "backbone", "generator"), {"backbone": 0.2, "generator": 1.0, "score": 0.5}, NAMES),
    ],
)
def test_losses_that_are_weighed_and_no_role_s_are_the_backbone_s(roles, weights, names):
    assert loss_names(SimpleNamespace(role_graph=graph_of(roles), loss_weights=weights)) == names


def test_one_loss_is_a_pair():
    found = returned_losses((LOSS, 3), NAMES[:1], "loss")
    assert (found.losses, found.counts, found.rest) == ((LOSS,), (3,), ())
    assert found.loss is LOSS


def test_several_losses_come_in_the_order_of_their_names():
    found = returned_losses(BOTH, NAMES, "loss")
    assert found.loss.tolist() == [6.0, 4.0]
    assert found.counts == (3, 2)
    assert tuple(map(float, found.summed)) == (10.0, 5.0)


@pytest.mark.parametrize(("output", "names"), [((LOSS, 3), NAMES[:1]), (BOTH, NAMES)])
def test_rows_that_others_read_stand_behind_the_losses(output, names):
    found = returned_losses(with_rows(output, ROWS), names, "loss", more=True)
    assert found.rest == (ROWS,)
    with pytest.raises(TypeError, match="loss returned"):
        returned_losses(with_rows(output, ROWS), names, "loss")


@pytest.mark.parametrize(
    ("output", "names", "words"),
    [
        (LOSS, NAMES[:1], r"loss returned a tensor of shape \[\]; return a pair: the loss summed over"),
        ((torch.zeros(2), 3), NAMES[:1], r"returned \(a tensor of shape \[2\], int 3\); return a pair"),
        ((LOSS, 3), NAMES, "return a dictionary of the losses 'backbone' and 'score', which `loss_weights` names"),
        ({"backbone": (LOSS, 3)}, NAMES, r"returned \{'backbone': \(a tensor of shape \[\], int 3\)\}; return a dict"),
        (BOTH, NAMES[:1], "return a pair"),
        ({**BOTH, "score": ERRORS}, NAMES, "return a dictionary"),
    ],
)
def test_something_else_is_told_what_to_return(output, names, words):
    with pytest.raises(TypeError, match=words):
        returned_losses(output, names, "loss")
