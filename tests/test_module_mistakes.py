"""What the author of a FlowModule is told who has made a mistake in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import ROLES
from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.feature_spec import FeatureSpec
from flowtrain_lightning.data import PackedBatch, PackedMedia, StepBatch
from flowtrain_lightning.parallel import ReplicatedHalf
from flowtrain_lightning.parallel.halves import half_parameters
from tests.exactness.layouts import trainer_for
from tests.tiny import TinyVLM, tiny_data, write_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    write_records(folder, 16)
    return folder


def first_step(folder: Path) -> StepBatch:
    data = tiny_data(folder)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def first_media(step: StepBatch) -> PackedMedia:
    return next(batch for batch in step.media["encoder"] if batch is not None)


def test_a_module_without_halves_is_told_what_to_define():
    with pytest.raises(NotImplementedError, match=r"Half must define configure_encoder, or configure_whole"):
        type("Half", (flow.FlowModule,), {})().configure_model()


@pytest.mark.parametrize("name", ["encode", "merge", "loss"])
def test_a_method_that_is_missing_is_named(name, folder):
    step = first_step(folder)
    module = type("Bare", (flow.FlowModule,), {})()
    batch = step.microbatches[0]
    arguments = {"encode": (first_media(step),), "merge": (batch, {}), "loss": (None, batch)}[name]
    with pytest.raises(NotImplementedError, match=f"Bare must define {name}"):
        getattr(module, name)(*arguments)


def test_batches_of_another_loader_are_refused(tmp_path):
    trainer = trainer_for("auto", max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(TypeError, match=r"packed steps of a FlowDataModule, but the loader gave dict"):
        trainer.fit(TinyVLM(), train_dataloaders=DataLoader([{"x": 1}], batch_size=None))


def test_logging_where_other_ranks_cannot_hear_it_is_refused(folder, tmp_path):
    class LogsInEncode(TinyVLM):
        def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
            self.log("pictures", len(media.rows))
            return super().encode(media)

    trainer = trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"log\('pictures'\) was called in encode"):
        trainer.fit(LogsInEncode(), datamodule=tiny_data(folder))


def test_an_encoder_with_other_rows_than_planned_is_told_both_numbers(folder, tmp_path):
    class DropsRow(TinyVLM):
        def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
            return tuple(level[1:] for level in super().encode(media))

    trainer = trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"DropsRow.encode returned \d+ rows of features .* promise \d+"):
        trainer.fit(DropsRow(), datamodule=tiny_data(folder))


def compute_of(module: TinyVLM, root: Path) -> Compute:
    engines = {role: ReplicatedHalf(half_parameters(module, role)) for role in ROLES}
    return Compute(module, trainer_for("auto", default_root_dir=root), torch.device("cpu"), engines)


def test_an_encoder_whose_features_need_more_room_than_was_reserved_is_told_of_both(folder, tmp_path):
    module = TinyVLM(levels=2)
    module.configure_model()
    compute = compute_of(module, tmp_path)
    compute.specs["image"] = FeatureSpec(((16,),), (torch.float32,))
    words = r"returned features of \[16\] torch.float32 and \[16\] torch.float32, but of \[16\] torch.float32 when"
    with pytest.raises(ValueError, match=words):
        compute.encode("encoder", first_media(first_step(folder)), step=(0, 0), number=0)


@pytest.mark.parametrize(
    ("output", "named"),
    [(None, "None"), ({"image": 1}, "dict {'image': 1}"), ([1, 2], r"list \[1, 2\]")],
    ids=["nothing", "a dictionary", "a list"],
)
def test_an_encoder_that_returns_no_tensors_is_told_what_to_return(folder, tmp_path, output, named):
    class Returns(TinyVLM):
        def encode(self, media: PackedMedia) -> Any:
            return output

    trainer = trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(TypeError, match=f"Returns.encode returned {named}; return a tensor with a row for"):
        trainer.fit(Returns(), datamodule=tiny_data(folder))


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (torch.zeros(()), r"a tensor of shape \[\]"),
        ((torch.zeros(3), 3), r"\(a tensor of shape \[3\], int 3\)"),
        ((1.5, 3), r"\(float 1.5, int 3\)"),
    ],
    ids=["no tokens", "a loss for each token", "a number without graph"],
)
def test_a_loss_that_is_no_pair_of_sum_and_tokens_is_told_what_to_return(folder, tmp_path, output, named):
    class Returns(TinyVLM):
        def loss(self, outputs: Tensor, batch: PackedBatch) -> Any:
            return output

    trainer = trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    with pytest.raises(TypeError, match=f"Returns.loss .* returned {named}; return a pair"):
        trainer.fit(Returns(), datamodule=tiny_data(folder))


def on_a_backbone_rank(module: TinyVLM, folder: Path, root: Path) -> tuple[Compute, StepBatch]:
    """Runs the methods of a module that has no encoder there, and the first step of the data."""
    module.set_local_roles(("backbone",))
    module.configure_model()
    return compute_of(module, root), first_step(folder)


def test_weights_of_a_half_on_other_ranks_are_told_as_such(folder, tmp_path):
    compute, step = on_a_backbone_rank(TinyVLM(), folder, tmp_path)
    words = r"TinyVLM computes on encoder ranks uses weights that other ranks hold, such as 'encoder\."
    with pytest.raises(RuntimeError, match=words):
        compute.encode("encoder", first_media(step), step=(0, 0), number=0)


def test_a_loss_of_weights_on_other_ranks_is_told_as_such(folder, tmp_path):
    class Penalised(TinyVLM):
        def backbone_step(self, batch: PackedBatch, features: Any, stage: str) -> Any:
            return sum(p.sum() for p in self.encoder.parameters()), 1

    compute, step = on_a_backbone_rank(Penalised(), folder, tmp_path)
    words = r"Penalised computes on backbone ranks uses weights that other ranks hold, such as 'encoder\..*no value"
    with pytest.raises(RuntimeError, match=words):
        compute.microbatch(step.microbatches[0], {}, stage="train", step=(0, 0), number=0)


def test_a_half_that_was_not_built_where_it_is_looked_for_is_named():
    class Elsewhere(TinyVLM):
        def configure_backbone(self) -> None:
            self.language = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="Elsewhere has no module 'backbone', where its backbone half should be"):
        Elsewhere().configure_model()


def test_a_module_built_for_one_role_is_not_used_whole(folder):
    module = TinyVLM()
    module.set_local_roles(("encoder",))
    module.configure_model()
    module.set_local_roles(("encoder", "backbone"))
    with pytest.raises(RuntimeError, match=r"holds encoder only.*load_from_checkpoint"):
        module.configure_model()
