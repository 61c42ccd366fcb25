"""The layout of one role."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import Layout


def test_a_layout_needs_the_product_of_its_degrees():
    assert Layout(data=2, tensor=3, pipeline=4, context=5).ranks == 120


def test_a_layout_says_what_is_special_about_it():
    assert Layout().describe() == "data 1, replicate"
    assert Layout(data=2, tensor=4).describe() == "data 2, tensor 4, replicate"


@pytest.mark.parametrize("name", ["data", "tensor", "pipeline", "context"])
def test_a_degree_below_one_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"The {name} degree of a layout is 0; it must be at least 1"):
        Layout(**{name: 0})


def test_an_unknown_sharding_is_refused_with_what_is_known():
    with pytest.raises(
        ValueError, match="A layout cannot shard by 'halves'; known are 'replicate', 'zero1', 'zero2', 'zero3', 'fsdp'"
    ):
        Layout(shard="halves")
