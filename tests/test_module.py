"""What a FlowModule promises: no sequence sees another, a step takes no more memory than a microbatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

import flowtrain_lightning as flow
from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia, StepBatch
from flowtrain_lightning.runtime.compute import Compute
from flowtrain_lightning.runtime.room import FeatureSpec
from tests.exactness.layouts import ranks_of, trainer_for
from tests.forks import Job, read_down, run_jobs
from tests.saved_tensors import KEPT_BATCHES
from tests.tiny import TinyVLM, tiny_data, write_records

FEW, MANY = 24, 96
"""Samples of a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    write_records(folder, 96, pictures_of=[1, 2, 0, 1] * 24)
    return folder


@pytest.fixture(scope="module")
def step(folder: Path) -> StepBatch:
    """A step whose first microbatch with media has several sequences, of which several have pictures."""
    data = tiny_data(folder, token_budget=400)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


@pytest.fixture(scope="module")
def microbatch(step: StepBatch) -> tuple[PackedBatch, PackedMedia]:
    batch, media = next(pair for pair in zip(step.microbatches, step.encoder_batches, strict=True) if None not in pair)
    assert batch is not None
    assert media is not None
    assert len(batch.samples) >= 4
    assert len(media.rows) >= 3
    return batch, media


@pytest.fixture(scope="module")
def module() -> TinyVLM:
    module = TinyVLM()
    module.configure_model()
    return module


def losses_of(module: TinyVLM, batch: PackedBatch, media: PackedMedia) -> list[Tensor]:
    """The loss at every token, for each sequence."""
    logits = module.backbone(**module.merge(batch, {"image": module.encode(media)}))
    losses = functional.cross_entropy(logits, batch.labels, ignore_index=IGNORED_LABEL, reduction="none")
    return list(losses.split(torch.diff(batch.cu_seqlens).tolist()))


def other_text(batch: PackedBatch, sequence: int) -> PackedBatch:
    start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
    places = [place for place in range(start, end) if place not in batch.media_positions["image"].tolist()]
    tokens = batch.tokens.clone()
    tokens[places] = (tokens[places] + 17) % 100
    return replace(batch, tokens=tokens)


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_no_sequence_sees_the_text_of_another(module, microbatch, sequence):
    batch, media = microbatch
    before, after = losses_of(module, batch, media), losses_of(module, other_text(batch, sequence), media)
    assert not torch.equal(before[sequence], after[sequence])
    for other in set(range(len(before))) - {sequence}:
        assert torch.equal(before[other], after[other])


def test_no_sequence_sees_the_picture_of_another(module, microbatch):
    batch, media = microbatch
    start, end = media.cu_seqlens[:2].tolist()
    patches = media.patches.clone()
    patches[start:end] = 1 - patches[start:end]
    before, after = losses_of(module, batch, media), losses_of(module, batch, media.with_patches(patches))
    first_row = int(batch.media_positions["image"][0])
    owner = int(torch.searchsorted(batch.cu_seqlens, first_row, right=True)) - 1
    assert not torch.equal(before[owner], after[owner])
    for other in set(range(len(before))) - {owner}:
        assert torch.equal(before[other], after[other])


def test_a_sequence_alone_has_the_loss_that_it_has_among_others(module, folder):
    """Each sample as a microbatch of its own: the same losses, to rounding."""
    together, alone = sample_losses(module, folder, 400), sample_losses(module, folder, 130)
    assert together.keys() == alone.keys()
    for sample, loss in together.items():
        torch.testing.assert_close(alone[sample], loss)


def sample_losses(module: TinyVLM, folder: Path, token_budget: int) -> dict[int, Tensor]:
    data = tiny_data(folder, token_budget=token_budget, pad_to_budget=True)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    found = {}
    for packed, media in zip(batch.microbatches, batch.encoder_batches, strict=True):
        features = {} if media is None else {"image": module.encode(media)}
        logits = module.backbone(**module.merge(packed, features))
        losses = functional.cross_entropy(logits, packed.labels, ignore_index=IGNORED_LABEL, reduction="none")
        split = losses.split(torch.diff(packed.cu_seqlens).tolist())
        found |= {sample: loss.detach().sum() for sample, loss in zip(packed.samples, split, strict=False)}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Layout -> samples of a step -> what each rank saw."""
    place = tmp_path_factory.mktemp("saved")
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for layout in ("auto", "1+1", "colocated 1"):
        for samples in (FEW, MANY):
            arguments = {"data": str(folder), "layout": layout, "global_batch_size": samples}
            target = "tests.saved_tensors:measure_saved_tensors"
            job = Job(f"{layout} {samples}", target, ranks_of(layout), arguments)
            done = run_jobs(place, [job])[job.name].check()
            found.setdefault(layout, {})[samples] = read_down(done.folder)
    return found


@pytest.mark.parametrize("layout", ["auto", "1+1", "colocated 1"])
def test_memory_does_not_grow_with_the_number_of_microbatches(saved, layout):
    for few, many in zip(saved[layout][FEW], saved[layout][MANY], strict=True):
        assert many["microbatches"] > 3.5 * few["microbatches"] > 3.5 * KEPT_BATCHES
        # Among more batches the heaviest are heavier; beyond these, nothing counts.
        assert many["most"] < 1.3 * few["most"] * max(1, many["heaviest"] / few["heaviest"])
        assert few["left"] == many["left"] == 0


def test_a_module_without_halves_is_told_what_to_define():
    with pytest.raises(NotImplementedError, match=r"Half must define configure_encoder, or configure_whole"):
        type("Half", (flow.FlowModule,), {})().configure_model()


@pytest.mark.parametrize("name", ["encode", "merge", "loss"])
def test_a_method_that_is_missing_is_named(name, microbatch):
    batch, media = microbatch
    module = type("Bare", (flow.FlowModule,), {})()
    arguments = {"encode": (media,), "merge": (batch, {}), "loss": (None, batch)}[name]
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


def test_an_encoder_whose_features_need_more_room_than_was_reserved_is_told_of_both(folder, tmp_path):
    module = TinyVLM(levels=2)
    module.configure_model()
    compute = Compute(module, trainer_for("auto", default_root_dir=tmp_path), torch.device("cpu"))
    compute.spec = FeatureSpec(((16,),), (torch.float32,))
    data = tiny_data(folder)
    data.setup("fit")
    media = next(batch for batch in next(iter(data.train_dataloader())).encoder_batches if batch is not None)
    words = r"returned features of \[16\] torch.float32 and \[16\] torch.float32, but of \[16\] torch.float32 when"
    with pytest.raises(ValueError, match=words):
        compute.encode(media, step=(0, 0), number=0)


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
    data = tiny_data(folder)
    data.setup("fit")
    module.live_on(("backbone",))
    module.configure_model()
    compute = Compute(module, trainer_for("auto", default_root_dir=root), torch.device("cpu"))
    return compute, next(iter(data.train_dataloader()))


def test_weights_of_a_half_on_other_ranks_are_told_as_such(folder, tmp_path):
    compute, step = on_a_backbone_rank(TinyVLM(), folder, tmp_path)
    media = next(batch for batch in step.encoder_batches if batch is not None)
    words = r"TinyVLM computes on encoder ranks uses weights that other ranks hold, such as 'encoder\."
    with pytest.raises(RuntimeError, match=words):
        compute.encode(media, step=(0, 0), number=0)


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
    module.live_on(("encoder",))
    module.configure_model()
    module.live_on(("encoder", "backbone"))
    with pytest.raises(RuntimeError, match=r"holds encoder only.*load_from_checkpoint"):
        module.configure_model()


def test_plain_training_is_reproducible_to_the_bit(folder, tmp_path):
    assert torch.equal(two_steps(folder, tmp_path), two_steps(folder, tmp_path))


def two_steps(folder: Path, root: Path) -> Tensor:
    module = TinyVLM(dropout=0.5)
    trainer = trainer_for("auto", max_steps=2, limit_val_batches=0, default_root_dir=root)
    trainer.fit(module, datamodule=tiny_data(folder))
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_clipping_by_value_takes_a_step_without_gradients():
    module = TinyVLM()
    module.configure_model()
    module.clip_gradients(torch.optim.SGD(module.parameters(), lr=1.0), 0.1, "value")
    assert all(parameter.grad is None for parameter in module.parameters())
