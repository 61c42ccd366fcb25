"""Modules whose gradients depend on packing are named in the log."""

from types import SimpleNamespace

import pytest
from torch import nn

from flowtrain_lightning.trainer.layout_invariance import not_layout_invariant


class SparseMoeBlock(nn.Module):
    pass


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Dropout(0.1), "random masks"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "random masks"),
        (nn.BatchNorm1d(3), "batch statistics"),
        (SparseMoeBlock(), "auxiliary losses of experts"),
    ],
)
def test_a_layer_that_couples_samples_is_named_with_its_reason(layer: nn.Module, reason: str) -> None:
    (sentence,) = not_layout_invariant(nn.ModuleDict({"inner": layer}))

    assert sentence.startswith(f"inner ({type(layer).__name__}): {reason} depend on how samples are packed")


def test_many_layers_make_one_sentence() -> None:
    (sentence,) = not_layout_invariant(nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2), nn.Dropout(0.3)))

    assert sentence.startswith("0 (Dropout) and 2 more: ")


def test_layers_that_treat_every_sample_alike_are_passed_over() -> None:
    assert not_layout_invariant(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.0))) == []


@pytest.mark.parametrize(("asked_for", "sentences"), [(False, 0), (True, 1)])
def test_experts_of_a_model_without_auxiliary_loss_are_passed_over(asked_for: bool, sentences: int) -> None:
    model = nn.Sequential(SparseMoeBlock())
    model.config = SimpleNamespace(output_router_logits=asked_for)

    assert len(not_layout_invariant(nn.ModuleDict({"model": model}))) == sentences
