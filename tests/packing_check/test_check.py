"""The packing check: it names every module that learns something else from packed samples, and no right one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import flowtrain_lightning as flow
from flowtrain_lightning.packing_check import report_of
from tests.packing_check.right_modules import RIGHT
from tests.packing_check.wrong_modules import WRONG
from tests.tiny import TinyVLM, tiny_data, write_records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 24)
    return folder


def named(modules: Iterable[type[TinyVLM]], quick: str) -> list[Any]:
    """Modules as parameters; those that are not among the quick ones run with the long tests."""
    marks: dict[bool, Any] = {True: (), False: pytest.mark.full}
    return [
        pytest.param(module, id=module.__name__, marks=marks[module.__name__ in quick.split()]) for module in modules
    ]


ONE_OF_EACH_SENTENCE = """
CountsOn BalancesExperts KeepsItsMask PadsImages PoolsFeatures IsAMean IsOne ShiftsTwiceInItsStep RepeatsTokens
BreaksTogether MixesBehindZeros MixesInBfloat16 MixesLongSamples SeesAllBehindAStart
"""
UNLIKE_WAYS = """
TwoLevels DropsByModule HeadAtTargets IsZero PreparesMedia OwnGenerator OnlyFloat32 HoldsALock ComputesInHalfPrecision
KeepsItsTable
"""


@pytest.mark.parametrize("module", named(WRONG, ONE_OF_EACH_SENTENCE))
def test_a_wrong_module_is_named_with_what_mixes(records, module):
    kind, words = WRONG[module]
    found = report_of(module(), tiny_data(records)).findings
    assert any(finding.kind == kind and words in finding.sentence for finding in found), found


@pytest.mark.parametrize("module", named(RIGHT, UNLIKE_WAYS))
def test_a_right_module_is_not_accused_however_unusual(records, module):
    report = report_of(module(), tiny_data(records))
    assert report.findings == []
    assert (report.dtype == torch.float32) == (module.__name__ == "OnlyFloat32")


def test_draws_of_python_hide_nothing_and_accuse_of_nothing_else(records):
    skips = next(module for module in WRONG if module.__name__ == "SkipsByPython")
    assert [finding.kind for finding in report_of(skips(), tiny_data(records)).findings] == ["random"]


def test_tokens_without_labels_that_are_learned_from_are_a_hint(records):
    squares = next(module for module in RIGHT if module.__name__ == "SquaresLogits")
    (hint,) = report_of(squares(), tiny_data(records)).hints
    assert "tokens without a label" in hint
    assert report_of(TinyVLM(), tiny_data(records)).hints == []


def test_the_check_leaves_module_and_generators_as_they_are(records):
    module, before = TinyVLM(), torch.get_rng_state()
    flow.check(module, tiny_data(records))
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(module.parameters())
    assert torch.get_default_dtype() == torch.float32


def test_a_module_that_is_built_is_checked_as_it_is(records):
    module = next(module for module in WRONG if module.__name__ == "SeesAll")()
    module.configure_model()
    weights = [weight.clone() for weight in module.parameters()]
    assert flow.check(module, tiny_data(records))
    assert all(map(torch.equal, weights, module.parameters()))
    assert all(weight.grad is None and weight.dtype == torch.float32 for weight in module.parameters())
