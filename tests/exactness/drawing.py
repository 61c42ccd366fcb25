"""A module that draws: an encoder, a decoder with queries and a generator behind it; and a run of it on any layout."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import Tensor, nn

from flowtrain_lightning import FlowCheckpointIO, FlowTrainStrategy
from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.callbacks import FlowMonitor
from flowtrain_lightning.data import FlowDataModule, PackedBatch, PackedMedia, PackedTargets, SampleSizes
from flowtrain_lightning.parallel import TensorPlan
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.hearing import SAVED_AT, Saver
from tests.exactness.layouts import SEED, ranks_of
from tests.exactness.modules import DeepEncoder, DividedBlock, DividedEncoder, divided_blocks
from tests.exactness.train import Recorder
from tests.exactness.two_losses import PLACES, places_of, told_places
from tests.forks import write_down
from tests.tiny import IMAGES, WIDTH, WORDS, Backbone, Block, TinyVLM, tiny_data

ROWS = 3
"""Places of a picture to be drawn among the tokens."""
GLOBAL_BATCH = 6
_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 0), (1, 1), (0, 0), (0, 2), (1, 1), (2, 1)),
    ((1, 0), (1, 0), (0, 0), (0, 0), (1, 0), (0, 0)),
    ((0, 0), (0, 2), (0, 0), (0, 1), (0, 3), (0, 0)),
    ((1, 1), (1, 1), (3, 1), (1, 2), (0, 0), (1, 1)),
    ((0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (0, 0)),
)
"""Of each sample of each step, how many pictures it shows and draws: a mixture, none drawn, none shown, all, one."""
STEPS = len(_STEPS)
NONE_DRAWN, NONE_SHOWN = 1, 2
WEIGHTS = {"backbone": 0.2, "generator": 1.5}
ALL_WEIGHTS = {**WEIGHTS, PLACES: 0.4}


class DrawingBackbone(Backbone):
    """A decoder of three blocks that gives its hidden states, too; ``divided``: tensor ranks can divide them."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.block, *more = (DividedBlock() if divided else Block(WIDTH) for _ in range(3))
        self.more = nn.ModuleList(more)

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
        x = self.block(x + self.place(position_ids), cu_seqlens, max_seqlen, True)
        for block in self.more:
            x = block(x, cu_seqlens, max_seqlen, True)
        return SimpleNamespace(hidden=x, logits=self.head(x))


class Drawer(nn.Module):
    """Predicts what leads from noise to a picture, from the mean of its condition's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.connector, self.embed = nn.Linear(WIDTH, WIDTH), nn.Linear(IMAGES.patch_dim + 1, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, IMAGES.patch_dim)

    def forward(self, noisy: Tensor, time: Tensor, condition: Tensor, items: PackedTargets) -> Tensor:
        owner = items.per_row(torch.arange(len(items)))
        mean = noisy.new_zeros(len(items), WIDTH).index_add(0, owner, self.connector(condition)) / ROWS
        x = self.embed(torch.cat([noisy, time], 1)) + items.per_patch(mean)
        for block in self.blocks:
            x = block(x, items.media.cu_seqlens, items.media.max_seqlen, False)
        return self.head(x)


class Drawing(TinyVLM):
    """Sees pictures, says words, and draws.

    Args:
        frozen: halves that do not train; ``"backbone"`` is all of it but its ``"queries"``.
        says: it learns words, too.
        weights: of its losses.
        divided: tensor ranks can divide the layers of encoder and backbone.
        tells: its backbone has another loss beside that of words.
    """

    halves: ClassVar = {"encoder": ("encoder",), "backbone": ("backbone", "queries"), "generator": ("drawer",)}
    condition_rows = ROWS

    def __init__(
        self,
        frozen: Sequence[str] = (),
        says: bool = True,
        weights: Mapping[str, float] | None = None,
        divided: bool = False,
        tells: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loss_weights = dict((ALL_WEIGHTS if tells else WEIGHTS) if weights is None else weights)

    def configure_encoder(self) -> None:
        made = (DividedEncoder if self.hparams["divided"] else DeepEncoder)(1, 0.0)
        self.encoder = made.requires_grad_("encoder" not in self.hparams["frozen"])

    def configure_backbone(self) -> None:
        self.backbone = DrawingBackbone(self.hparams["divided"]).requires_grad_(
            "backbone" not in self.hparams["frozen"]
        )
        self.queries = nn.Embedding(ROWS, WIDTH).requires_grad_("queries" not in self.hparams["frozen"])

    def configure_generator(self) -> None:
        self.drawer = Drawer()

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        arguments = super().merge(batch, features)
        queries = self.queries.weight.repeat(batch.generated, 1)
        arguments["x"] = arguments["x"].index_copy(0, batch.condition_positions, queries)
        return arguments

    def loss(self, outputs: Any, batch: PackedBatch) -> Any:
        said = super().loss(outputs.logits, batch) if self.hparams["says"] else (outputs.hidden.new_zeros(()), 0)
        return {"backbone": said, PLACES: told_places(outputs.logits, batch)} if self.hparams["tells"] else said

    def loss_counts(self, sizes: SampleSizes) -> Mapping[str, int]:
        return places_of(sizes) if self.hparams["tells"] else {}

    def condition(self, outputs: Any, batch: PackedBatch) -> Tensor:
        return outputs.hidden.index_select(0, batch.condition_positions)

    def generator_loss(self, items: PackedTargets, condition: Tensor) -> tuple[Tensor, int]:
        pictures, noise, time = (
            items.values,
            items.normal_like("noise"),
            items.per_patch(items.uniform("time"))[:, None],
        )
        found = self.drawer((1 - time) * pictures + time * noise, time, condition, items)
        self.log("time", time.mean())
        return ((found - (noise - pictures)) ** 2).sum(), pictures.numel()

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        return divided_blocks(("encoder.block",) if role == "encoder" else ("backbone.block", "backbone.more.*"))

    def logits(self, outputs: Any) -> Tensor:
        return outputs.logits

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.encoder.parameters()), "weight_decay": 0.1},
            {"params": [*self.backbone.parameters(), *self.queries.parameters()], "weight_decay": 0.0},
            {"params": list(self.drawer.parameters()), "weight_decay": 0.05},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class Mortal(Drawing):
    """The same; a process of one half is killed in some step, of the backbone's not the first.

    Args:
        dies: the half.
        module: arguments of `Drawing`.
    """

    def __init__(self, dies: str, **module: Any) -> None:
        super().__init__(**module)
        self.dies = dies

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        self._work_as("encoder")
        return super().encode(media)

    def loss(self, outputs: Any, batch: PackedBatch) -> Any:
        self._work_as("backbone")
        return super().loss(outputs, batch)

    def generator_loss(self, items: PackedTargets, condition: Tensor) -> tuple[Tensor, int]:
        self._work_as("generator")
        return super().generator_loss(items, condition)

    def _work_as(self, half: str) -> None:
        late = self.trainer.training and self.trainer.global_step >= SAVED_AT
        if late and half == self.dies and self.trainer.global_rank > 0:
            os.kill(os.getpid(), signal.SIGKILL)


def write_drawings(folder: Path) -> None:
    """Writes the records of all steps, in their order, and the same to validate on and to predict."""
    draw = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (shown, drawn) in enumerate(sample for step in _STEPS for sample in step):
        paths = []
        for picture in range(shown + drawn):
            high, wide = (int(n) for n in draw.integers(8, 33, 2))
            paths.append(f"{number}-{picture}.png")
            Image.fromarray(draw.integers(0, 255, (high, wide, 3), dtype=np.uint8)).save(folder / paths[-1])
        asked = [{"type": "image", "path": path} for path in paths[:shown]]
        told = [{"type": "image", "path": path, "generate": True} for path in paths[shown:]]
        words = " ".join(draw.choice(WORDS, int(draw.integers(1, 6))))
        messages = [
            {"role": "user", "content": [*asked, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": [*told, {"type": "text", "text": words}]},
            {"role": "user", "content": [{"type": "text", "text": "sure?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        ]
        lines.append(json.dumps({"messages": messages}))
    for stage in ("train", "val", "predict"):
        (folder / f"{stage}.jsonl").write_text("\n".join(lines) + "\n")


def drawings(folder: Path, **settings: Any) -> FlowDataModule:
    """The steps above, in their order."""
    return tiny_data(folder, **{"shuffle": False, "global_batch_size": GLOBAL_BATCH, "token_budget": 150, **settings})


def allocation_of(layout: str) -> Allocation:
    """``"1+2+3"`` is one rank that encodes, two of the backbone, which come first, and three that generate.

    ``"colocated 2"`` gives two ranks all roles. ``"1+2+1 fsdp backbone"`` has a role in shards, and ``"1+2+1 tensor
    backbone"`` divides its layers; without a role it is all of them.
    """
    counted, *how = layout.removeprefix("colocated ").split(" ")
    if layout.startswith("colocated"):
        ranks = dict.fromkeys(Drawing.halves, range(int(counted)))
    else:
        encoders, backbones, generators = map(int, counted.split("+"))
        first = backbones + encoders
        ranks = {
            "encoder": range(backbones, first),
            "backbone": range(backbones),
            "generator": range(first, first + generators),
        }
    layouts = {role: Layout(len(each)) for role, each in ranks.items()}
    for role in how[1:] or (Drawing.halves if how else ()):
        size = len(ranks[role])
        layouts[role] = Layout(size, shard="fsdp") if how[0] == "fsdp" else Layout(**{how[0]: size})
    placement: Any = "colocated" if layout.startswith("colocated") else "separate"
    return Allocation(placement, layouts, {role: tuple(each) for role, each in ranks.items()})


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    module: dict[str, Any] | None = None,
    clip: float | None = None,
    resume: str | None = None,
    strategy: dict[str, Any] | None = None,
    dies: str | None = None,
    watched: bool = False,
) -> None:
    """Trains ``STEPS`` steps under ``"auto"``, ``"ddp 2"`` or on such a layout; then validates and predicts.

    Writes ``rank<r>.pt`` as every test of exactness does, and down: what was logged in validation, and how many
    predictions this rank made.
    """
    chosen: Any = layout.partition(" ")[0]
    is_plain = chosen in ("auto", "ddp")
    if not is_plain:
        chosen = FlowTrainStrategy(allocation=allocation_of(layout), hang_timeout=120, **(strategy or {}))
    recorder = Recorder()
    L.seed_everything(SEED, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks_of(layout),
        strategy=chosen,
        plugins=[FlowCheckpointIO()] if is_plain else None,
        precision="64-true",
        max_steps=STEPS,
        limit_val_batches=0,
        gradient_clip_val=clip,
        callbacks=[recorder, Saver(), *([FlowMonitor(every_n_steps=1)] if watched else [])],
        default_root_dir=folder,
        logger=CSVLogger(folder, "log", "") if watched else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Mortal(dies, **(module or {})) if dies else Drawing(**(module or {}))
    trainer.fit(model, drawings(Path(data)), ckpt_path=resume)
    recorder.save(folder)
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    trainer.limit_val_batches = 1.0
    (validated,) = trainer.validate(model, drawings(Path(data)), verbose=False)
    predicted = trainer.predict(model, drawings(Path(data)))
    write_down(folder, [logged, validated, sum(len(batch) for batch in predicted or [])])
    disconnect_groups()
