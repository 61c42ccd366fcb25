"""What a FlowModule promises: no sequence sees another, a step takes no more memory than a microbatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia, PackingConfig, StepBatch
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
    batch, media = next(pair for pair in zip(step.microbatches, step.media["encoder"], strict=True) if None not in pair)
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
    data = tiny_data(folder, token_budget=token_budget, packing=PackingConfig(pad_to_budget=True))
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    found = {}
    for packed, media in zip(batch.microbatches, batch.media["encoder"], strict=True):
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


def test_plain_training_is_reproducible_to_the_bit(folder, tmp_path):
    assert torch.equal(two_steps(folder, tmp_path), two_steps(folder, tmp_path))


def two_steps(folder: Path, root: Path) -> Tensor:
    module = TinyVLM(dropout=0.5)
    trainer = trainer_for("auto", max_steps=2, limit_val_batches=0, default_root_dir=root)
    trainer.fit(module, datamodule=tiny_data(folder))
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("algorithm", ["value", "VALUE"])
def test_clipping_by_value_is_asked_for_in_letters_of_any_case(algorithm):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 0.05])
    TinyVLM().clip_gradients(torch.optim.SGD([weight], 0.1), 0.1, algorithm)
    assert weight.grad.tolist() == pytest.approx([0.1, 0.05])


def test_another_way_to_clip_is_refused_not_taken_for_the_norm():
    with pytest.raises(ValueError, match="give 'norm' or 'value'"):
        TinyVLM().clip_gradients(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1), 0.1, "inf")


def test_clipping_by_value_takes_a_step_without_gradients():
    module = TinyVLM()
    module.configure_model()
    module.clip_gradients(torch.optim.SGD(module.parameters(), lr=1.0), 0.1, "value")
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_limit_of_zero_clips_nothing_as_lightning_has_it(algorithm):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    TinyVLM().clip_gradients(torch.optim.SGD([weight], 0.1), 0.0, algorithm)
    assert weight.grad.tolist() == [3.0, 3.0]
