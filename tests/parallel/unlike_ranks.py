"""Modules whose tensor or context ranks would train wrongly, and unusual right ones; what ranks say of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

from flowtrain_lightning.parallel import TensorPlan
from tests.exactness.data import steps_data, write_steps
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.modules import Divided, DividedBackbone, DividedTokens
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import WIDTH


class ForgetsHeadNorm(Divided):
    """Its plan does not say that the norm of each head sees a share of the heads."""

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        return {name: style for name, style in super().tensor_plan(role, ranks).items() if "head_norm" not in name}


class ForgetsOneHeadNorm(Divided):
    """Its plan names all norms of heads but one."""

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        plan = {name: style for name, style in super().tensor_plan(role, ranks).items() if "more.*.head" not in name}
        return {**plan, "backbone.more.0.head_norm": "replicated_with_grad_allreduce"}


class SumsNorm(Divided):
    """Its plan takes a norm that sees all for one that sees a share of the heads."""

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        return {**super().tensor_plan(role, ranks), f"{role}.block.norm": "replicated_with_grad_allreduce"}


class Adapted(nn.Module):
    """A linear layer beside two narrow factors, of which the second one begins with zeros."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class ForgetsAdapter(Divided):
    """Its plan forgets adapters of heads, whose first factor has no gradient in the first step."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        for block in (self.backbone.block, *self.backbone.more):
            block.head_norm = Adapted(block.size)

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        named = "replicated_with_grad_allreduce"
        plan = {name: style for name, style in super().tensor_plan(role, ranks).items() if "head_norm" not in name}
        if role == "encoder":
            return plan
        return {**plan, "backbone.block.head_norm": named, "backbone.more.*.head_norm.second": named}


class UnlikeStart(Divided):
    """Rank 1 begins with another weight."""

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 1:
            with torch.no_grad():
                self.backbone.more[1].norm.bias.add_(0.1)


class AttendsInSlice(nn.Module):
    """A block whose attention sees the tokens that it is given, each sequence by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, sequences: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
        sees = (sequences[:, None] == sequences[None, :]).tril()
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        return x + self.out(seen.transpose(0, 1).flatten(1))


class OneOfFour(DividedBackbone):
    """Of four layers one does not attend by `varlen_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.more[1] = AttendsInSlice()

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = self.block(x + self.place(position_ids), cu_seqlens, max_seqlen, True)
        for block in self.more:
            if isinstance(block, AttendsInSlice):
                x = block(x, (position_ids == 0).cumsum(0))
            else:
                x = block(x, cu_seqlens, max_seqlen, True)
        return self.head(x)


class NoneOfThem(OneOfFour):
    """No layer attends by `varlen_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.block = AttendsInSlice()
        self.more = nn.ModuleList(AttendsInSlice() for _ in range(2))

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x, sequences = x + self.place(position_ids), (position_ids == 0).cumsum(0)
        for block in (self.block, *self.more):
            x = block(x, sequences)
        return self.head(x)


class Shifts(DividedBackbone):
    """Adds to every token the one before it, within a sequence: a convolution that ends at the slice's border."""

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        before = functional.pad(x, (0, 0, 1, 0))[:-1] * (position_ids > 0)[:, None]
        return super().forward(x + 0.1 * before, position_ids, cu_seqlens, max_seqlen)


class CountsPositions(DividedBackbone):
    """Works positions out of the bounds of sequences, which are those of all tokens."""

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
        positions = (torch.arange(len(starts)) - starts)[: len(x)]
        return super().forward(x, positions, cu_seqlens, max_seqlen)


class Centres(DividedBackbone):
    """Takes away the mean over the tokens that it is given."""

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return super().forward(x - 0.1 * x.mean(0), position_ids, cu_seqlens, max_seqlen)


class Unusual(DividedBackbone):
    """Right: dropout, a counter in a buffer, a single number that scales, and a weight that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.never = nn.Dropout(0.1), nn.Parameter(torch.ones(3))
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        self.calls += 1
        return super().forward(self.dropout(x) * self.gain, position_ids, cu_seqlens, max_seqlen)


class PlainBackbone(Divided):
    """Its backbone is one of those above, and no tensor rank divides it.

    Attributes:
        kind: of the backbone.
    """

    kind: type[DividedBackbone] = DividedBackbone

    def configure_backbone(self) -> None:
        self.backbone = self.kind()


class ForgetsPositions(Divided):
    """Slices tokens and no positions, and its backbone takes as many as it needs."""

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        return {
            **super().slice_tokens(arguments, own),
            "position_ids": arguments["position_ids"][: own.stop - own.start],
        }


class WeighsLoss(Divided):
    """Its loss is weighed by the share of targets among the tokens that it is given."""

    def loss(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return loss * tokens / len(batch.tokens), tokens


class CoupledLoss(WeighsLoss):
    """The same, and says so: with context ranks it is another loss than on one rank."""

    couples = ("loss",)


def _with(backbone: type[DividedBackbone], couples: tuple[str, ...] = ()) -> type[Divided]:
    return type(f"With{backbone.__name__}", (PlainBackbone,), {"kind": backbone, "couples": couples})


KINDS: dict[str, type[Divided]] = {
    "head norm": ForgetsHeadNorm,
    "one head norm": ForgetsOneHeadNorm,
    "summed norm": SumsNorm,
    "adapter": ForgetsAdapter,
    "start": UnlikeStart,
    "right": Divided,
    "right tokens": DividedTokens,
    "no attention": _with(NoneOfThem),
    "one of four": _with(OneOfFour),
    "shift": _with(Shifts),
    "counted positions": _with(CountsPositions),
    "mean": _with(Centres, couples=("backbone", "loss")),
    "positions": ForgetsPositions,
    "loss": WeighsLoss,
    "coupled loss": CoupledLoss,
    "unusual": _with(Unusual),
}


def ranks_say(folder: Path) -> Callable[..., list[dict[str, Any]]]:
    """A function that trains a module in a layout, and returns what each rank says of it."""
    write_steps(folder / "data")

    def say(kind: str, layout: str, role: dict[str, Any], precision: str = "64-true") -> list[dict[str, Any]]:
        arguments = {"data": str(folder / "data"), "kind": kind, "layout": layout, "role": role, "precision": precision}
        name = f"{kind} {layout} {precision} {len(role)}"
        job = Job(name, "tests.parallel.unlike_ranks:train", ranks_of(layout), arguments)
        return read_down(run_jobs(folder, [job])[job.name].folder)

    return say


def train(folder: Path, *, data: str, kind: str, layout: str, role: dict[str, Any], precision: str = "64-true") -> None:
    """Trains four steps, and writes down what came of them: the error, if one ended them, and how many steps."""
    steps: list[float] = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
            steps.append(float(outputs["loss"]))

    roles = {"backbone": role}
    settings = {"precision": precision, "max_steps": 4, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = trainer_for(layout, strategy={"roles": roles}, callbacks=[Count()], **settings)
    said = ""
    try:
        trainer.fit(KINDS[kind](), datamodule=steps_data(Path(data)))
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
    write_down(folder, {"said": said, "steps": steps})
