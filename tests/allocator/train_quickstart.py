"""Trains the quickstart for some steps on two ranks; each writes what it holds and its peak resident memory in bytes.

python train_quickstart.py separate|colocated FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L

import flowtrain_lightning as flow
from recipes.quickstart.module import QuickstartVLM

DATA = Path(__file__).parents[2] / "recipes/quickstart"


def quickstart_data(folder):
    images = flow.ImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096)
    return flow.FlowDataModule(
        train=DATA / "data/train.jsonl",
        tokenizer=DATA / "tokenizer.json",
        images=images,
        token_budget=256,
        global_batch_size=16,
        index=flow.IndexConfig(cache_dir=folder),
        seed=1,
    )


class Peak(L.Callback):
    def on_train_end(self, trainer, pl_module):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        held = [role for role in ("encoder", "backbone") if not next(getattr(pl_module, role).parameters()).is_meta]
        (Path(sys.argv[2]) / f"rank{trainer.global_rank}.txt").write_text(f"{'+'.join(held)} {peak}")


def main():
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=flow.FlowTrainStrategy(placement=sys.argv[1]),
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Peak()],
    )
    trainer.fit(QuickstartVLM(), quickstart_data(Path(sys.argv[2])))


if __name__ == "__main__":
    main()
