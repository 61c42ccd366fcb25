"""An `encode` that computes with weights of another half is refused where that has values, as where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from tests.exactness.layouts import trainer_for
from tests.runtime.keeping import fit
from tests.tiny import WIDTH, TinyVLM, tiny_data, write_records


class ProjectsInEncode(TinyVLM):
    """Its projector lies on the backbone, so that a frozen tower could work ahead, and is called in `encode` still."""

    halves: ClassVar = {"encoder": ("encoder",), "backbone": ("backbone", "projector")}

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.projector = nn.Linear(WIDTH, WIDTH)

    def encode(self, media: Any) -> tuple[Tensor, ...]:
        return tuple(self.projector(rows) for rows in super().encode(media))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 16, pictures_of=[1, 0] * 8)
    write_records(folder, 4, "val.jsonl", seed=1)
    return folder


def train(records: Path, module: TinyVLM, layout: str = "colocated 1", **settings: Any) -> None:
    trainer = trainer_for(layout, max_steps=1, default_root_dir=records, **settings)
    trainer.fit(module, datamodule=tiny_data(records))


@pytest.mark.parametrize("checks_first", [0, 1])
@pytest.mark.parametrize("freezes", [False, True])
def test_weights_of_the_backbone_in_encode_are_refused_by_name(records, freezes, checks_first):
    with pytest.raises(ValueError, match=r"encode computes with 'projector.* lies on the backbone.*`merge` or `loss`"):
        train(records, ProjectsInEncode(freeze_encoder=freezes), num_sanity_val_steps=checks_first)


def test_those_that_do_not_train_may_be_used_and_one_process_trains_all(records):
    class Frozen(ProjectsInEncode):
        def configure_backbone(self) -> None:
            super().configure_backbone()
            self.projector.requires_grad_(False)

    train(records, Frozen())
    train(records, ProjectsInEncode(), layout="auto")


def test_features_that_follow_from_weights_of_another_half_are_not_kept(records, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.runtime.keeping.CountingVLM", type("Counting", (ProjectsInEncode,), {"calls": 0}))
    with pytest.raises(RuntimeError, match="`encode` computes with weights that train, of another half"):
        fit(records, "auto", tmp_path / "store")
