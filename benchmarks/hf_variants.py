"""What every rank of `beside_hf.py` does: the Trainer of transformers, TRL's SFTTrainer, or flowtrain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.nn.functional import cross_entropy

import flowtrain_lightning as flow
from benchmarks.hf_model import as_rows, processor
from benchmarks.modules import ROOT
from flowtrain_lightning.data import IGNORED_LABEL, IndexConfig

VARIANTS = {"trainer": "transformers.Trainer", "sft": "TRL SFTTrainer", "flowtrain": "flowtrain"}
"""Name -> what it is, in tables."""

LEARNING_RATE = 1e-3
CLIP = 1.0
TOKEN_BUDGET = 4096


@dataclass(frozen=True)
class Job:
    """What one run does.

    Attributes:
        variant: one of ``VARIANTS``.
        model: folder of the model.
        records: the training file, read in its order.
        folder: where the ranks write what they measured.
        ranks: how many processes.
        warmup: steps before the measurement.
        steps: all steps.
        batch_size: samples of a step over all ranks.
        losses: write the loss of every step; it costs time, so not where time is measured.
    """

    variant: str
    model: Path
    records: Path
    folder: Path
    ranks: int
    warmup: int
    steps: int
    batch_size: int
    losses: bool = False


class Watch:
    """Wall-clock and CPU time of this process over the measured steps, and the most memory that it took."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        self._ended = 0
        self._begun = self._done = (0.0, 0.0)
        self.losses: list[tuple[float, int, float]] = []

    def step_ended(self) -> None:
        """Counts a step."""
        self._ended += 1
        self._done = time.monotonic(), time.process_time()
        if self._ended == self._job.warmup:
            self._begun = self._done

    def write(self) -> None:
        """Leaves what was measured in the run's folder."""
        seconds, computed = (end - start for end, start in zip(self._done, self._begun, strict=True))
        peak = _memory("VmHWM") - self._before
        found = {"seconds": seconds, "cpu_seconds": computed, "peak_bytes": peak, "losses": self.losses}
        (self._job.folder / f"rank{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


def _memory(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def train(job: Job) -> None:
    """Train, as one of the ranks."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    if job.variant == "flowtrain":
        _flowtrain(job)
    else:
        _hugging_face(job)


def start_once(job: Job) -> None:
    """Start flowtrain as users do, by a script: it measures the halves to plan by, which later starts find.

    Ranks that are forked from here have no script to measure in.
    """
    command = [sys.executable, "-m", "benchmarks.hf_variants", json.dumps(asdict(job), default=str)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode or "as planning failed" in done.stderr + done.stdout:
        raise RuntimeError(f"flowtrain did not plan:\n{(done.stderr + done.stdout)[-3000:]}")


def _from_command() -> None:
    fields = json.loads(sys.argv[1])
    paths = {name: Path(fields[name]) for name in ("model", "records", "folder")}
    fit(Job(**{**fields, **paths}), [])


def _flowtrain(job: Job) -> None:
    fit(job, [_LightningWatch(Watch(job))])


def fit(job: Job, callbacks: list[L.Callback]) -> None:
    """Nothing but the model's name, and how large a step is."""
    model = flow.models.from_pretrained(job.model, lr=LEARNING_RATE)
    data = flow.FlowDataModule(
        job.records,
        token_budget=TOKEN_BUDGET,
        global_batch_size=job.batch_size,
        shuffle=False,
        index=IndexConfig(cache_dir=job.records.parent),
    )
    trainer = L.Trainer(
        strategy="flowtrain",
        accelerator="cpu",
        devices=job.ranks,
        max_steps=job.steps,
        gradient_clip_val=CLIP,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=job.folder,
    )
    trainer.fit(model, data)


class _LightningWatch(L.Callback):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        loss = trainer.callback_metrics["train_loss"].item()
        self._watch.losses.append((loss, 1, loss))
        self._watch.step_ended()

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._watch.write()


def _hugging_face(job: Job) -> None:
    """A script as users write it; rates, schedule, clipping and order are those of flowtrain's."""
    import transformers
    import trl

    watch = Watch(job)
    settings: dict[str, Any] = {
        "output_dir": str(job.folder / "out"),
        "per_device_train_batch_size": job.batch_size // job.ranks,
        "max_steps": job.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1 if job.losses else 10,
        "ddp_backend": "gloo" if job.ranks > 1 else None,
    }
    rows, reads = as_rows(job.records), processor(job.model)
    model = transformers.AutoModelForImageTextToText.from_pretrained(job.model, dtype=torch.float32)
    given: dict[str, Any] = {"model": model, "train_dataset": rows, "callbacks": [_callback(watch)]}
    kind: Any
    if job.variant == "sft":
        # Beside the order, clipping and schedule above these are TRL's own defaults, recomputing among them.
        given["args"] = trl.SFTConfig(**settings, assistant_only_loss=True, max_length=None)
        kind, given["processing_class"] = trl.SFTTrainer, reads
    else:
        given["args"] = transformers.TrainingArguments(**settings, remove_unused_columns=False)
        kind, given["data_collator"] = transformers.Trainer, partial(pad, reads)
    (_told(kind, watch) if job.losses else kind)(**given).train()


def pad(reads: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The collate function of everybody's script: images into their turns, then the processor, which pads."""
    conversations = []
    for row in rows:
        images = iter(row["images"])
        turns = [
            {
                "role": turn["role"],
                "content": [
                    {"type": "image", "image": next(images)} if part["type"] == "image" else part
                    for part in turn["content"]
                ],
            }
            for turn in row["messages"]
        ]
        conversations.append(turns)
    batch = reads.apply_chat_template(
        conversations,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "padding_side": "right", "return_tensors": "pt"},
    )
    learned = torch.as_tensor(batch.pop("assistant_masks")).bool()
    batch["labels"] = batch["input_ids"].masked_fill(~learned, IGNORED_LABEL)
    return dict(batch)


def _callback(watch: Watch) -> Any:
    """Tells the watch when steps end, and what the Trainer says that its loss is."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_ended()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs and watch.losses:
                total, number, _told = watch.losses[state.global_step - 1]
                watch.losses[state.global_step - 1] = (total, number, float(logs["loss"]))

        def on_train_end(self, *_: Any, **__: Any) -> None:
            watch.write()

    return Watching()


def _told(kind: Any, watch: Watch) -> Any:
    """A Trainer that also notes, for every step, the sum of the loss over its rank's target tokens and their number."""

    class Told(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **settings: Any) -> Any:
            targets = inputs["labels"][:, 1:]
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **settings)
            scores = outputs.logits[:, :-1].detach().transpose(1, 2)
            total = cross_entropy(scores.float(), targets, ignore_index=IGNORED_LABEL, reduction="sum")
            watch.losses.append((total.item(), int((targets != IGNORED_LABEL).sum()), float("nan")))
            return (loss, outputs) if return_outputs else loss

    return Told


if __name__ == "__main__":
    _from_command()
