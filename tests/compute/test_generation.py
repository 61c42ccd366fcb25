"""Greedy generation on packed sequences, with features from wherever they were encoded."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from flowtrain_lightning.compute.generation import generate_greedily
from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of, trainer_for
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import TinyVLM, tiny_data, write_records

VOCABULARY = 50


class CountingBackbone(nn.Module):
    """Foretells, at every token, the sum of its sequence's tokens so far and of the features in it."""

    def forward(self, tokens: Tensor, features: Tensor, cu_seqlens: Tensor) -> Tensor:
        values = tokens + features
        logits = torch.zeros(len(tokens), VOCABULARY)
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            logits[torch.arange(start, end), values[start:end].cumsum(0) % VOCABULARY] = 1.0
        return logits


class Counting(TinyVLM):
    max_new_tokens = 3

    def configure_backbone(self) -> None:
        self.backbone = CountingBackbone()  # type: ignore[assignment]

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        placed = torch.zeros_like(batch.tokens)
        if features:
            placed[batch.media_positions["image"]] = features["image"]
        check_consistent(batch)
        return {"tokens": batch.tokens, "features": placed, "cu_seqlens": batch.cu_seqlens}


def check_consistent(batch: PackedBatch) -> None:
    lengths = torch.diff(batch.cu_seqlens)
    assert int(batch.cu_seqlens[-1]) == len(batch.tokens) == len(batch.labels) == len(batch.position_ids)
    assert batch.position_ids.tolist() == [place for length in lengths.tolist() for place in range(length)]
    assert int(lengths.max()) <= batch.max_seqlen


def packed(*sequences: list[int], media: list[int] | None = None, padding: int = 0) -> PackedBatch:
    lengths = [len(sequence) for sequence in sequences] + ([padding] if padding else [])
    tokens = torch.tensor([token for sequence in sequences for token in sequence] + [0] * padding)
    return PackedBatch(
        tokens=tokens,
        labels=torch.full_like(tokens, IGNORED_LABEL),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=max(lengths),
        media_positions={} if media is None else {"image": torch.tensor(media)},
        samples=tuple(range(len(sequences))),
        targets=tokens[:0],
    )


def counting(**attributes: Any) -> Counting:
    module = Counting()
    module.configure_model()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_each_sequence_goes_on_by_its_own_likeliest_tokens():
    assert generate_greedily(counting(), packed([1, 2], [5]), {}) == [(0, [3, 6, 12]), (1, [5, 10, 20])]


def test_features_stay_at_the_places_of_their_media_while_sequences_grow():
    batch = packed([1, 0, 2], [0, 5], media=[1, 3])
    features = {"image": torch.tensor([7, 20])}
    assert generate_greedily(counting(), batch, features) == [(0, [10, 20, 40]), (1, [25, 0, 0])]


def test_a_sequence_ends_at_the_end_token_and_the_others_go_on():
    assert generate_greedily(counting(end_token=6), packed([1, 2], [5]), {}) == [(0, [3]), (1, [5, 10, 20])]


def test_a_sequence_ends_at_any_of_several_end_tokens():
    assert generate_greedily(counting(end_token=(6, 20)), packed([1, 2], [5]), {}) == [(0, [3]), (1, [5, 10])]


def test_nothing_is_computed_once_all_have_ended():
    module = counting(end_token=3, max_new_tokens=100)
    assert generate_greedily(module, packed([1, 2]), {}) == [(0, [])]


def test_padding_is_no_sequence():
    found = generate_greedily(counting(), packed([1, 2], [5], padding=4), {})
    assert found == [(0, [3, 6, 12]), (1, [5, 10, 20])]


def test_sequences_are_named_by_their_samples():
    batch = replace(packed([1, 2], [5]), samples=(17, 4))
    assert [sample for sample, _ in generate_greedily(counting(), batch, {})] == [17, 4]


def test_generation_keeps_no_graph():
    module = TinyVLM()
    module.configure_model()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: pytest.fail("kept"), lambda tensor: tensor):
        generate_greedily(module, packed([1, 2]), {})


def predict(folder: Path, *, data: str, layout: str) -> None:
    """Writes the predictions of this rank: ``[[sample, [token, ...]], ...]``."""
    trainer = trainer_for(layout, precision="64-true", default_root_dir=folder)
    outputs = trainer.predict(TinyVLM(), datamodule=tiny_data(Path(data), global_batch_size=4))
    write_down(folder, [pair for step in outputs or [] for microbatch in step for pair in microbatch])
    disconnect_groups()


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list]]:
    folder = tmp_path_factory.mktemp("predictions")
    write_records(folder / "data", 10, "predict.jsonl", seed=2)
    jobs = [
        Job(
            layout,
            "tests.compute.test_generation:predict",
            ranks_of(layout),
            {"data": str(folder / "data"), "layout": layout},
        )
        for layout in ("auto", "1+1", "1+2", "colocated 2")
    ]
    return {name: read_down(done.check().folder) for name, done in run_jobs(folder, jobs).items()}


@pytest.mark.parametrize("layout", ["1+1", "1+2", "colocated 2"])
def test_predictions_with_features_through_the_pool_are_those_of_one_process(predictions, layout):
    (alone,) = predictions["auto"]
    everywhere = [pair for rank in predictions[layout] for pair in rank]
    assert [sample for sample, _ in sorted(alone)] == list(range(10))
    assert sorted(everywhere) == sorted(alone)


def test_an_encoder_rank_predicts_nothing(predictions):
    assert predictions["1+1"][1] == []
    assert predictions["1+2"][2] == []


class Times(L.Callback):
    """Predicts slowly on backbone ranks; notes when this rank had its last batch, and when it leaves."""

    def on_predict_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(0.3 if trainer.is_global_zero else 0.0)
        self.done = time.monotonic()

    def teardown(self, *_: Any, stage: str) -> None:
        self.left = time.monotonic()


def predict_slowly(folder: Path, *, data: str) -> None:
    times = Times()
    trainer = trainer_for("1+1", precision="64-true", default_root_dir=folder, callbacks=[times])
    trainer.predict(TinyVLM(), datamodule=tiny_data(Path(data), global_batch_size=4))
    write_down(folder, {"done": times.done, "left": times.left})
    disconnect_groups()


def test_an_encoder_rank_stays_until_the_backbone_has_predicted_from_its_features(tmp_path):
    write_records(tmp_path / "data", 10, "predict.jsonl", seed=2)
    job = Job("slow", "tests.compute.test_generation:predict_slowly", 2, {"data": str(tmp_path / "data")})
    backbone, encoder = read_down(run_jobs(tmp_path, [job])["slow"].check().folder)
    assert encoder["done"] < backbone["done"] <= encoder["left"]
