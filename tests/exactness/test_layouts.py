"""Losses, gradients and weights of every layout are those of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from tests.exactness.compare import Run, error, read_run, same_bits
from tests.exactness.data import MIXED, NO_PICTURE, ONE_PICTURE, STEPS, write_steps
from tests.exactness.layouts import ALL, ranks_of
from tests.exactness.train import Named
from tests.forks import Job, run_jobs

LIMIT = {"64-true": 1e-9, "32-true": 1e-5}
PLAIN: dict[str, Any] = {}
LEVELS_AND_CLIP: dict[str, Any] = {"module": {"levels": 2}, "clip": 0.2}


@dataclass(frozen=True)
class Case:
    """A layout, and what else differs."""

    layout: str
    precision: str = "64-true"
    levels_and_clip: bool = False
    kind: str = "tiny"
    attempt: int = 1

    def __str__(self) -> str:
        more = ", two levels, clipped" if self.levels_and_clip else ""
        return f"{self.layout}, {self.precision}{more}{'' if self.kind == 'tiny' else f', {self.kind}'}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"precision": self.precision, "kind": self.kind, **(LEVELS_AND_CLIP if self.levels_and_clip else PLAIN)}


QUICK = [
    *(Case(layout) for layout in ALL),
    *(Case(layout, levels_and_clip=True) for layout in ("1+1", "2+3")),
    Case("2+3", "32-true"),
    Case("1+1", kind="whole"),
    *(Case(layout, kind="unused level") for layout in ("auto", "1+1", "colocated 2")),
]
LONG = [Case("auto", kind="whole")] + [
    case
    for precision in LIMIT
    for more in (False, True)
    for layout in ALL
    if (case := Case(layout, precision, more)) not in QUICK
]
CASES = [*(pytest.param(case, id=str(case)) for case in QUICK)] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Run]:
    """Runs a case, or the reference (layout ``"plain"``), once."""
    folder = tmp_path_factory.mktemp("layouts")
    write_steps(folder / "data")

    @cache
    def run(case: Case) -> Run:
        name = f"{case} {case.attempt}"
        arguments = {"data": str(folder / "data"), **case.settings}
        if case.layout == "plain":
            job = Job(name, "tests.exactness.reference:train", 1, arguments)
        else:
            job = Job(name, "tests.exactness.train:train", ranks_of(case.layout), {**arguments, "layout": case.layout})
        return read_run(run_jobs(folder, [job])[name].check().folder)

    return run


def reference_of(case: Case) -> Case:
    return replace(case, layout="plain", attempt=1)


@pytest.mark.parametrize("case", CASES)
def test_initial_weights_are_equal_to_the_bit(run: Callable[[Case], Run], case: Case):
    assert error(run(case).initial, run(reference_of(case)).initial) == 0.0


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_plain_loop(run: Callable[[Case], Run], case: Case):
    assert run(case).losses == pytest.approx(run(reference_of(case)).losses, rel=LIMIT[case.precision])


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_of_every_step_is_that_of_the_plain_loop(run: Callable[[Case], Run], case: Case):
    errors = [error(*pair) for pair in zip(run(case).gradients, run(reference_of(case)).gradients, strict=True)]
    assert len(errors) == STEPS
    assert max(errors) <= LIMIT[case.precision], errors


@pytest.mark.parametrize("case", CASES)
def test_every_weight_after_five_steps_of_adamw_is_that_of_the_plain_loop(run: Callable[[Case], Run], case: Case):
    found, expected = run(case).weights[-1], run(reference_of(case)).weights[-1]
    if case.precision == "32-true":
        found, expected = without_key_biases(found), without_key_biases(expected)
    assert error(found, expected) <= LIMIT[case.precision]


def without_key_biases(weights: Named) -> Named:
    """Weights less the biases of the keys.

    Softmax takes no notice of them, so that their gradient is nothing but rounding, which AdamW scales up to whole
    steps. No output depends on them.
    """
    kept = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("attention.bias") and tensor is not None:
            query, _, value = tensor.chunk(3)
            kept |= {name: None, f"{name}.query": query, f"{name}.value": value}
    return kept


@pytest.mark.parametrize("layout", ALL)
def test_a_half_that_a_step_did_not_use_has_no_gradient_and_stands_still(run: Callable[[Case], Run], layout: str):
    result = run(Case(layout))
    encoder = [name for name in result.initial if name.startswith("encoder.")]
    unused = result.gradients[NO_PICTURE]
    assert all(unused[name] is None for name in encoder)
    assert all(unused[name] is not None for name in unused if name not in encoder)
    before, after = result.weights[NO_PICTURE - 1], result.weights[NO_PICTURE]
    assert encoder
    for name in encoder:
        assert before[name].equal(after[name])


@pytest.mark.parametrize("layout", ALL)
def test_one_picture_in_the_whole_step_trains_the_encoder(run: Callable[[Case], Run], layout: str):
    gradients = run(Case(layout)).gradients[ONE_PICTURE]
    assert all(gradient is not None and gradient.norm() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("layout", ALL)
def test_a_step_accumulates_over_several_microbatches(run: Callable[[Case], Run], layout: str):
    steps = run(Case(layout)).microbatches
    assert all(counts[MIXED] > 1 for counts in steps)
    assert len(set(map(tuple, steps))) == 1


def test_of_mixed_ranks_all_encode_where_there_is_much_to_encode(run: Callable[[Case], Run]):
    steps = run(Case("mixed 1+2")).encoder_batches
    assert all(of_rank[MIXED] > 0 for of_rank in steps)
    assert [of_rank[ONE_PICTURE] for of_rank in steps] == [0, 0, 1]


@pytest.mark.parametrize("layout", ["auto", "1+1", "colocated 2"])
def test_a_tensor_of_features_that_nobody_reads_gets_no_gradient(run: Callable[[Case], Run], layout: str):
    gradients = run(Case(layout, kind="unused level")).gradients[MIXED]
    assert gradients["encoder.heads.0.weight"] is not None
    assert gradients["encoder.heads.1.weight"] is None


@pytest.mark.parametrize("layout", ["1+2", pytest.param("1+1", marks=pytest.mark.full)])
def test_the_same_run_twice_gives_the_same_bits(run: Callable[[Case], Run], layout: str):
    assert same_bits(run(Case(layout)), run(Case(layout, attempt=2)))
