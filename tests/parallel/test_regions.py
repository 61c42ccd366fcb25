"""Regions of tensors overlap, are split, and cover a tensor exactly once, as counting number by number says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.parallel.regions import (
    Region,
    cover_exactly_once,
    regions_of_run,
    rows_around_run,
    whole,
)


@st.composite
def regions_of(draw, shape):
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True)]
    return Region(tuple(starts), tuple(sizes))


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@given(st.data(), shapes)
def test_a_region_indexes_what_it_names(data, shape):
    region = data.draw(regions_of(shape))
    numbers = torch.arange(whole(shape).elements).view(shape)
    found = numbers[region.within(whole(shape))]
    assert found.shape == region.sizes
    assert found.flatten()[0] == numbers[region.offsets]


@given(st.data(), shapes)
def test_what_two_regions_have_in_common_is_what_both_mark(data, shape):
    one, other = data.draw(regions_of(shape)), data.draw(regions_of(shape))
    marks = torch.zeros(shape)
    for region in (one, other):
        marks[region.within(whole(shape))] += 1
    common = one.overlap(other)
    assert int((marks == 2).sum()) == (0 if common is None else common.elements)
    if common is not None:
        assert (marks[common.within(whole(shape))] == 2).all()


@given(st.data(), shapes, st.integers(1, 70))
def test_the_pieces_of_a_region_cover_it_exactly_once_and_are_no_larger_than_asked(data, shape, most):
    region = data.draw(regions_of(shape))
    pieces = list(region.split(most))
    marks = torch.zeros(shape)
    for piece in pieces:
        marks[piece.within(whole(shape))] += 1
    assert (marks[region.within(whole(shape))] == 1).all()
    assert marks.sum() == region.elements
    cut = next((dim for dim, size in enumerate(region.sizes) if size > 1), None)
    assert all(piece.elements <= most or piece.sizes[cut] == 1 for piece in pieces)


@given(st.data(), shapes)
def test_regions_cover_a_tensor_exactly_once_where_counting_says_so(data, shape):
    pieces = list(whole(shape).split(data.draw(st.integers(1, 20))))
    chosen = data.draw(st.lists(st.sampled_from(pieces), max_size=len(pieces) + 1))
    for regions in (pieces, chosen, [*pieces[1:], data.draw(regions_of(shape))]):
        marks = torch.zeros(shape)
        for region in regions:
            marks[region.within(whole(shape))] += 1
        assert cover_exactly_once(shape, regions) == bool((marks == 1).all())


@pytest.mark.parametrize(
    ("shape", "regions"),
    [
        ((2,), [Region((1,), (2,))]),
        ((2,), [Region((-1,), (2,))]),
        ((2,), [Region((0, 0), (2, 1))]),
        ((2,), [Region((0,), (3,)), Region((0,), (-1,))]),
        ((0, 3), [Region((0, 0), (0, 3))]),
        ((), []),
    ],
)
def test_regions_outside_of_the_tensor_or_without_numbers_do_not_cover_it(shape, regions):
    assert not cover_exactly_once(shape, regions)


def test_a_tensor_without_numbers_is_covered_by_nothing_and_a_scalar_by_itself():
    assert cover_exactly_once((0, 3), [])
    assert cover_exactly_once((), [whole(())])


@given(st.data(), shapes)
def test_a_run_of_elements_is_what_its_boxes_hold_in_their_order(data, shape):
    numbers = torch.arange(whole(shape).elements).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    size = data.draw(st.integers(0, numbers.numel() - start))
    boxes = [numbers[box.within(whole(shape))].flatten() for box in regions_of_run(shape, start, size)]
    assert [int(number) for box in boxes for number in box] == list(range(start, start + size))
    assert len(boxes) < 2 * max(1, len(shape))


@given(st.data(), shapes)
def test_the_rows_around_a_run_are_those_that_it_touches(data, shape):
    numbers = torch.arange(whole(shape).elements).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    size = data.draw(st.integers(0, numbers.numel() - start))
    rows = numbers[rows_around_run(shape, start, size).within(whole(shape))]
    held = set(rows.flatten().tolist())
    assert held >= set(range(start, start + size))
    if shape:
        assert len(rows) == len({number // numbers[0].numel() for number in range(start, start + size)})
