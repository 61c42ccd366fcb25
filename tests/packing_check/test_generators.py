"""What is generated is checked as well: items of one forward must not depend on each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from flowtrain_lightning.data import PackedTargets
from flowtrain_lightning.packing_check import report_of
from tests.exactness.drawing import Drawing, drawings, write_drawings


class Coupled(Drawing):
    """Its generator sees the mean of all conditions of a forward."""

    def generator_loss(self, items: PackedTargets, condition: Tensor) -> tuple[Tensor, int]:
        return super().generator_loss(items, condition - condition.mean(0))


class Averaging(Drawing):
    """Its generator's loss is a mean."""

    def generator_loss(self, items: PackedTargets, condition: Tensor) -> tuple[Tensor, int]:
        loss, count = super().generator_loss(items, condition)
        return loss / count, count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawings")
    write_drawings(folder)
    return folder


def test_a_generator_that_takes_each_item_by_itself_passes(folder):
    assert report_of(Drawing(), drawings(folder)).findings == []


@pytest.mark.full
@pytest.mark.parametrize("kind", [Coupled, Averaging])
def test_one_that_does_not_is_found(folder, kind):
    (finding,) = report_of(kind(), drawings(folder)).findings
    assert "the loss of a sample changes with the others in its microbatch" in finding.sentence
