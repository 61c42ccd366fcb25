"""What a user of `transformers` has today: its Trainer and its own model, on batches padded to their longest sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import is_flash_attn_2_available

from benchmarks.padded import PaddedDataset, RankSampler, Sample
from flowtrain_lightning.data import IGNORED_LABEL
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.data.steps.sampler import Sampling

_FRAMES = 2
"""Moments that a tower of Qwen takes together; a picture is repeated."""


def train_padded(
    config: dict[str, Any],
    steps: StepDataset,
    *,
    rank: int,
    ranks: int,
    samples: int,
    device: torch.device,
    recompute: bool,
    num_workers: int,
    max_steps: int,
    folder: Path,
    step_ended: Callable[[], None],
) -> None:
    """Trains as a script for ``transformers`` does, on the samples of the packed variants, step by step.

    Args:
        config: of the model, which begins from random weights.
        steps: of the packed variants.
        rank: of this process.
        ranks: that train, each on its share of a step.
        samples: of one padded batch; gradients are accumulated over those of a step.
        device: where it trains: on a GPU in bfloat16 with fused AdamW, on a CPU in float32.
        recompute: gradient checkpointing.
        num_workers: processes that load.
        max_steps: how many steps.
        folder: for what the Trainer writes.
        step_ended: called after every step.
    """
    assert isinstance(steps.sampling, Sampling), "a step is a number of samples here"
    on_gpu = device.type == "cuda"
    with device:
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(**config),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            attn_implementation="flash_attention_2" if on_gpu and is_flash_attn_2_available() else "sdpa",
        )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=steps.sampling.global_batch_size // (samples * ranks),
        gradient_checkpointing=recompute,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # nor do the others clip
        use_cpu=not on_gpu,
        ddp_backend=None if ranks == 1 else "nccl" if on_gpu else "gloo",
        ddp_find_unused_parameters=ranks > 1,  # some batches have no pictures
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    loader = DataLoader(
        PaddedDataset(steps.samples),
        batch_size=samples,
        sampler=RankSampler(steps.sampling, rank, ranks),
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=on_gpu,
    )
    trainer = _OrderedTrainer(model=model, args=arguments, callbacks=[_StepEnds(step_ended)])
    trainer.loader = loader
    trainer.train()


class _OrderedTrainer(Trainer):  # type: ignore[misc]
    """Takes its batches from a loader that is given, so that a step has the samples that it has elsewhere."""

    loader: DataLoader[Sample]

    def get_train_dataloader(self) -> DataLoader[Sample]:
        """The loader as it is, with this rank's samples alone; the Trainer moves its batches to its device."""
        return self.loader


class _StepEnds(TrainerCallback):  # type: ignore[misc]
    """Says when a step is over."""

    def __init__(self, step_ended: Callable[[], None]) -> None:
        self._step_ended = step_ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As the Trainer calls it."""
        self._step_ended()


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """The arguments of a Qwen-VL of ``transformers``: sequences padded to the longest, all patches in one row."""
    pictures = [picture for sample in samples for picture in sample["pictures"]]

    def padded(name: str, fill: int) -> Tensor:
        return pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=fill)

    lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
    tokens = padded("tokens", 0)
    # The model shifts labels itself, and ours are shifted already.
    labels = functional.pad(padded("labels", IGNORED_LABEL)[:, :-1], (1, 0), value=IGNORED_LABEL)
    batch = {
        "input_ids": tokens,
        "labels": labels,
        "attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
        "mm_token_type_ids": padded("is_media", 0).int(),
    }
    if pictures:
        patches = torch.cat([patches for patches, _, _ in pictures])
        moments = patches.view(len(patches), 3, 1, -1).repeat(1, 1, _FRAMES, 1)
        batch["pixel_values"] = moments.flatten(1)
        batch["image_grid_thw"] = torch.tensor([(1, *grid) for _, grid, _ in pictures])
    return batch
