"""The way of a researcher with two encoders and a loss of one's own, by docs/layouts.md and docs/guide.md alone."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.paths import ROOT
from tests.tiny import write_records
from tests.ways.pasting import adapted, blocks, run

SECTION = "An encoder for each modality"
MODULE, STRATEGY, _, SOURCE = blocks("docs/layouts.md", "python", SECTION)
(ALLOCATION,) = blocks("docs/layouts.md", "yaml", SECTION)
OWN_MODULE, OTHER_LOSS, *_ = blocks("docs/guide.md", "python")

OWN = """
class Weighed(SeesAndHears):
    def loss(self, logits, batch):  # a regression beside the sum over tokens, as docs/guide.md says of two losses
        loss, tokens = super().loss(logits, batch)
        ends = batch.cu_seqlens[1 : len(batch.samples) + 1].long() - 1
        return loss + 0.1 * logits[ends, 0].square().sum(), tokens


if __name__ == "__main__":
    import lightning as L

    paths = [f"{number}.npy" for number in range(4)]
    recordings = Recordings(paths, [3, 12, 5, 8], [[20, 30], [40], [50, 60], [70]])
    data = flow.FlowDataModule(["train.jsonl", recordings], tokenizer="tokenizer.json", token_budget=512)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=3, max_epochs=1, logger=False)
    trainer.fit(Weighed(), data)
    print("loss", float(trainer.callback_metrics["train_loss"]))
"""


@pytest.fixture
def own_data(tmp_path):
    """A folder with somebody's records, recordings and tokenizer."""
    write_records(tmp_path, 8)
    shutil.copy(ROOT / "recipes/quickstart/tokenizer.json", tmp_path)
    for number, count in enumerate([3, 12, 5, 8]):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(number).random((count, 80), dtype=np.float32))
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("who", ["found", "said", "by an allocation"])
def test_two_encoders_on_ranks_of_their_own_train_by_a_loss_of_one_s_own(own_data, who):
    fewer = {"data: 4}, ranks: 0-3": "data: 1}, ranks: 0", "data: 3}, ranks: 4-6": "data: 1}, ranks: 1"}
    (own_data / "allocation.yaml").write_text(adapted(ALLOCATION, {**fewer, "ranks: 7": "ranks: 2"}))
    strategy = {
        "found": 'strategy = "flowtrain"',
        "said": adapted(STRATEGY, {'"encoder_image": 3': '"encoder_image": 1'}),
        "by an allocation": 'strategy = flow.FlowTrainStrategy(allocation="allocation.yaml")',
    }[who]
    (own_data / "train.py").write_text("\n\n".join([MODULE, strategy, SOURCE, OWN]))
    assert "loss " in run(own_data, "python train.py")


@pytest.mark.full
def test_the_module_of_the_guide_with_its_second_loss_trains_on_two_processes(own_data):
    fit = """
import lightning as L
data = flow.FlowDataModule("train.jsonl", tokenizer="tokenizer.json", token_budget=8192)
trainer = L.Trainer(strategy="flowtrain", accelerator="cpu", devices=2, max_steps=2, logger=False)
trainer.fit(Scores(), data)
print("loss", float(trainer.callback_metrics["train_loss"]))
"""
    smaller = {"vocabulary=32_000, width=512, depth=8": "vocabulary=1024, width=64, depth=1"}
    (own_data / "train.py").write_text(adapted(OWN_MODULE + OTHER_LOSS + fit, smaller))
    assert "loss " in run(own_data, "python train.py")
