"""A module that sees and hears, samples in memory for it, and a run of it on any layout of its three halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.allocator import Allocation, Layout, Sharding
from flowtrain_lightning.callbacks import FlowMonitor
from flowtrain_lightning.data import (
    FlowDataModule,
    GivenTokens,
    LoadedMedia,
    PackedBatch,
    PackedMedia,
    Record,
    SampleSizes,
)
from flowtrain_lightning.parallel import TensorPlan
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import SEED, ranks_of
from tests.exactness.modules import (
    DeepBackbone,
    DeepEncoder,
    DividedBackbone,
    DividedBlock,
    DividedEncoder,
    divided_blocks,
)
from tests.exactness.train import Recorder
from tests.forks import write_down
from tests.tiny import IMAGES, WIDTH, Backbone, Block, CharTokenizer, Encoder, TinyVLM

BINS = 6
FRAMES_PER_ROW = 2
MEDIA_IDS = {"image": 3, "audio": 4, "touch": 5}
IMAGE, AUDIO, TOUCH = ("image",), ("audio",), ("touch",)
GLOBAL_BATCH = 6
_STEPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (IMAGE, (), (*IMAGE, *IMAGE), IMAGE, (), IMAGE),
    (IMAGE, AUDIO, (*IMAGE, *AUDIO), (), (*AUDIO, *IMAGE, *IMAGE), (*AUDIO, *AUDIO)),
    ((), AUDIO, AUDIO, (), (*AUDIO, *AUDIO), ()),
    ((), (), (), (), (), ()),
    ((*IMAGE, *AUDIO), IMAGE, (), (*IMAGE, *IMAGE, *IMAGE), IMAGE, ()),
    (AUDIO, (*AUDIO, *IMAGE, *AUDIO), IMAGE, AUDIO, (*IMAGE, *AUDIO), ()),
)
"""Of each sample of each step, what it shows and plays: images, all kinds, audio, nothing, one clip of audio, all."""
STEPS = len(_STEPS)
SAVED_AT = 2


@dataclass(frozen=True)
class Given:
    """An image, or a clip of audio or of what is felt, in memory.

    Attributes:
        modality: which of them.
        values: ``[patches or frames, width]`` float32.
        grid: patches down and across; of audio one row of frames.
    """

    modality: str
    values: np.ndarray[Any, Any]
    grid: tuple[int, int]

    def __str__(self) -> str:
        return f"in memory ({self.modality})"

    @property
    def rows(self) -> int:
        return len(self.values) // (4 if self.modality == "image" else FRAMES_PER_ROW)

    def load(self) -> LoadedMedia:
        return LoadedMedia(self.values, self.grid, self.rows, modality=self.modality)


@dataclass(frozen=True)
class Sample:
    """A sample in memory.

    Attributes:
        ids: the tokens, one for each media item.
        learned: which of them are learned.
        media: in order.
    """

    ids: np.ndarray[Any, Any]
    learned: np.ndarray[Any, Any]
    media: tuple[Given, ...]


class Memory:
    """A source of samples that are all in memory.

    Args:
        first: with whose samples it begins, a step.
        feels: every other sample with media has something to feel as well.
    """

    def __init__(self, first: int = 0, *, feels: bool = False) -> None:
        self.fingerprint = f"samples of images and audio{' and touch' * feels}"
        draw = np.random.default_rng(5)
        kinds = [kinds for step in _STEPS[first:] for kinds in step]
        more = [TOUCH if feels and own and number % 2 else () for number, own in enumerate(kinds)]
        self.samples = [_drawn((*own, *felt), draw) for own, felt in zip(kinds, more, strict=True)]
        media = [item for sample in self.samples for item in sample.media]
        counts = [len(sample.media) for sample in self.samples]
        self._sizes = SampleSizes(
            tokens=np.array([len(s.ids) + sum(item.rows - 1 for item in s.media) for s in self.samples]),
            targets=np.array([int(s.learned[1:].sum()) for s in self.samples]),
            media_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            media_rows=np.array([item.rows for item in media]),
            media_patches=np.array([len(item.values) for item in media]),
            media_modality=np.array([item.modality for item in media]),
        )

    def __len__(self) -> int:
        return len(self.samples)

    def sizes(self, samples: np.ndarray[Any, Any]) -> SampleSizes:
        return self._sizes.select(samples)

    def record(self, sample: int) -> Record:
        found = self.samples[sample]
        written = GivenTokens(found.ids, found.learned, tuple(MEDIA_IDS.values()))
        return Record(f"sample {sample}", str(sample), (), found.media, {}, written=written)


def _drawn(kinds: tuple[str, ...], draw: np.random.Generator) -> Sample:
    media: list[Given] = []
    for kind in kinds:
        if kind == "image":
            high, wide = (int(n) for n in 2 * draw.integers(1, 4, 2))
            media.append(Given(kind, draw.random((high * wide, IMAGES.patch_dim), dtype=np.float32), (high, wide)))
        else:
            frames = FRAMES_PER_ROW * int(draw.integers(1, 9))
            media.append(Given(kind, draw.random((frames, BINS), dtype=np.float32), (1, frames)))
    words = draw.integers(6, CharTokenizer.vocabulary, int(draw.integers(4, 12)))
    places = np.sort(draw.integers(0, len(words) // 2, len(kinds)))
    ids = np.insert(words, places, [MEDIA_IDS[kind] for kind in kinds])
    learned = (np.arange(len(ids)) >= len(ids) - len(words) // 2) & ~np.isin(ids, tuple(MEDIA_IDS.values()))
    return Sample(ids.astype(np.int64), learned, tuple(media))


class Ear(nn.Module):
    """Frames of audio -> a row for two of them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(BINS, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.block = Block(WIDTH)
        self.head = nn.Linear(FRAMES_PER_ROW * WIDTH, WIDTH)

    def forward(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.block(self.dropout(self.embed(media.patches)), media.cu_seqlens, media.max_seqlen, False)
        return (self.head(x.unflatten(0, (-1, FRAMES_PER_ROW)).flatten(1)),)


class SeeingAndHearing(TinyVLM):
    """An eye, an ear and a decoder.

    Args:
        frozen: modalities whose encoders do not train.
        dropout: in both encoders.
    """

    halves: ClassVar = {"encoder_image": ("eye",), "encoder_audio": ("ear",), "backbone": ("backbone",)}

    def __init__(self, frozen: Sequence[str] = (), dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.save_hyperparameters()

    def configure_encoder_image(self) -> None:
        self.eye = Encoder(1, self.hparams["dropout"]).requires_grad_("image" not in self.hparams["frozen"])

    def configure_encoder_audio(self) -> None:
        self.ear = Ear(self.hparams["dropout"]).requires_grad_("audio" not in self.hparams["frozen"])

    def configure_backbone(self) -> None:
        self.backbone = Backbone()

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return {"image": self.eye, "audio": self.ear}[media.modality](media)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        x = self.backbone.embed(batch.tokens)
        for modality, rows in features.items():
            x = x.index_add(0, batch.media_positions[modality], rows)
        return {
            "x": x,
            "position_ids": batch.position_ids,
            "cu_seqlens": batch.cu_seqlens,
            "max_seqlen": batch.max_seqlen,
        }

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.eye.parameters(), *self.ear.parameters()], "weight_decay": 0.1},
            {"params": list(self.backbone.parameters()), "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class WideEar(SeeingAndHearing):
    """The same; its ear hands on two tensors, one as wide as the eye's and a wider one, of which `merge` makes one."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        (rows,) = super().encode(media)
        return (rows,) if media.modality == "image" else (rows, torch.cat([rows, rows], 1))

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        if "audio" in features:
            rows, wide = features["audio"]
            features = features | {"audio": (rows + wide[:, :WIDTH] + wide[:, WIDTH:]) / 3}
        return super().merge(batch, features)


class DividedHearing(SeeingAndHearing):
    """The same, of layers that tensor ranks can divide and sequences that context ranks can share."""

    def configure_encoder_image(self) -> None:
        self.eye = DividedEncoder(1, self.hparams["dropout"])

    def configure_encoder_audio(self) -> None:
        super().configure_encoder_audio()
        self.ear.block = DividedBlock()

    def configure_backbone(self) -> None:
        self.backbone = DividedBackbone()

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        return {**arguments, "x": arguments["x"][own], "position_ids": arguments["position_ids"][own]}

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        half = {"encoder_image": "eye", "encoder_audio": "ear", "backbone": "backbone"}[role]
        return divided_blocks([f"{half}.block", *(["backbone.more.*"] if role == "backbone" else [])])


class DeepHearing(SeeingAndHearing):
    """The same, with an eye and a decoder of several blocks, which can be stages."""

    def configure_encoder_image(self) -> None:
        self.eye = DeepEncoder(1, self.hparams["dropout"]).requires_grad_("image" not in self.hparams["frozen"])

    def configure_backbone(self) -> None:
        self.backbone = DeepBackbone()


class Feeling(DividedHearing):
    """The same, with a third encoder, which feels."""

    halves: ClassVar = {"encoder_touch": ("skin",), **DividedHearing.halves}

    def configure_encoder_touch(self) -> None:
        self.skin = Ear(0.0).requires_grad_("touch" not in self.hparams["frozen"])

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return self.skin(media) if media.modality == "touch" else super().encode(media)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.add_param_group({"params": list(self.skin.parameters()), "weight_decay": 0.05})
        return optimizer


LETTERS = ("a", "b", "c")


class Letters(SeeingAndHearing):
    """The same, with halves of other names, of which ``edges`` say what flows between them."""

    halves: ClassVar = {letter: (letter,) for letter in LETTERS}
    edges: ClassVar = {"image": ("a", "c"), "audio": ("b", "c")}

    def configure_a(self) -> None:
        self.a = Encoder(1, self.hparams["dropout"]).requires_grad_("image" not in self.hparams["frozen"])

    def configure_b(self) -> None:
        self.b = Ear(self.hparams["dropout"]).requires_grad_("audio" not in self.hparams["frozen"])

    def configure_c(self) -> None:
        self.c = Backbone()

    eye = property(lambda self: self.a)
    ear = property(lambda self: self.b)
    backbone = property(lambda self: self.c)


def module_of(
    wide: bool = False, letters: bool = False, divided: bool = False, feels: bool = False, deep: bool = False
) -> type[SeeingAndHearing]:
    """The module of a case."""
    chosen = {Letters: letters, WideEar: wide, Feeling: feels, DividedHearing: divided, DeepHearing: deep}
    return next((kind for kind, is_wanted in chosen.items() if is_wanted), SeeingAndHearing)


def memory_data(train: Memory | None = None, *, feels: bool = False, **settings: Any) -> FlowDataModule:
    """The samples, in their order; those of ``train`` instead, if it is given."""
    defaults = {"token_budget": 48, "global_batch_size": GLOBAL_BATCH, "shuffle": False, "tokenizer": CharTokenizer()}
    rest = Memory(feels=feels)
    return FlowDataModule(train or rest, rest, predict=rest, **{**defaults, "seed": 1, **settings})


def allocation_of(layout: str, names: tuple[str, ...] = ("encoder_image", "encoder_audio", "backbone")) -> Allocation:
    """``"2+1+3"`` is two ranks for images, one for audio, and three that read both, which come first.

    ``"colocated 2"`` gives two ranks all three roles, and ``"mixed 1+2"`` one rank both encoders and two more all
    three. ``"1+1+2 fsdp"`` has what reads in shards, or by DeepSpeed ``"1+1+2 deepspeed-2"``, and ``"2+1+1 tensor
    image"`` divides what encodes images; ``"colocated 4 stages image"`` has it in two stages of shards.

    Args:
        layout: see above.
        names: of the roles, the one that reads last.
    """
    counted, *how = layout.removeprefix("colocated ").removeprefix("mixed ").split(" ")
    *encoders, trunk = names
    *counts, readers = map(int, counted.split("+"))
    kind: Any = layout.partition(" ")[0]
    placement = kind if kind in ("colocated", "mixed") else "separate"
    ranks = {trunk: range(readers)}
    if placement == "separate":
        for number, role in enumerate(encoders):
            first = readers + sum(counts[:number])
            ranks[role] = range(first, first + counts[number])
    else:
        ranks |= dict.fromkeys(encoders, range(readers + sum(counts)))
    layouts = {role: Layout(len(each)) for role, each in ranks.items()}
    if how:
        role = dict(zip(MEDIA_IDS, encoders, strict=False)).get(how[-1], trunk)
        size = len(ranks[role])
        if how[0] == "stages":
            layouts[role] = Layout(size // 2, pipeline=2, shard="fsdp")
        else:
            in_shards = how[0] in get_args(Sharding)
            layouts[role] = Layout(size, shard=how[0]) if in_shards else Layout(**{how[0]: size})
    return Allocation(placement, layouts, {role: tuple(each) for role, each in ranks.items()})


class Saver(L.Callback):
    """Saves ``saved.ckpt`` after some steps."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def train(
    folder: Path,
    *,
    layout: str,
    module: dict[str, Any] | None = None,
    clip: float | None = None,
    resume: str | None = None,
    workers: int = 0,
    wide: bool = False,
    letters: bool = False,
    divided: bool = False,
    feels: bool = False,
    deep: bool = False,
    precision: Any = "64-true",
) -> None:
    """Trains ``STEPS`` steps under ``"auto"``, ``"ddp 2"`` or on such a layout; then validates and predicts.

    Writes ``rank<r>.pt`` as every test of exactness does, and down: the kinds of work that this rank's lanes did in
    training, the validation's loss, how many predictions this rank made, and whether it has worked ahead in training.
    """
    strategy: Any = layout.partition(" ")[0]
    if strategy not in ("auto", "ddp"):
        names = LETTERS if letters else tuple(f"encoder_{name}" for name in [*MEDIA_IDS][: 2 + feels])
        names = names if letters else (*names, "backbone")
        strategy = FlowTrainStrategy(allocation=allocation_of(layout, names), hang_timeout=60)
    recorder = Recorder()
    L.seed_everything(SEED, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks_of(layout),
        strategy=strategy,
        precision=precision,
        max_steps=STEPS,
        limit_val_batches=0,
        gradient_clip_val=clip,
        callbacks=[recorder, Saver(), *([FlowMonitor(every_n_steps=1)] if letters else [])],
        default_root_dir=folder,
        logger=CSVLogger(folder, "log", "") if letters else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = module_of(wide, letters, divided, feels, deep)(**(module or {}))
    trainer.fit(model, memory_data(feels=feels, num_workers=workers), ckpt_path=resume)
    recorder.save(folder)
    spans = trainer.strategy.runner.timeline.spans if isinstance(trainer.strategy, FlowTrainStrategy) else []
    spans = [span for span in spans if span.stage == "train"]
    work = sorted({span.name for span in spans if span.kind == "compute"})
    ends = {span.step: span.end for span in spans if span.name == "end of the step"}
    ahead = any(span.start < ends.get(span.step - 1, 0.0) for span in spans if span.kind == "compute")
    trainer.limit_val_batches = 1.0
    (validated,) = trainer.validate(model, memory_data(feels=feels), verbose=False)
    predicted = trainer.predict(model, memory_data(feels=feels))
    write_down(folder, [work, validated["val_loss"], sum(len(batch) for batch in predicted or []), ahead])
    disconnect_groups()
