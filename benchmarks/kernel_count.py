"""Operations of one microbatch of a large model, and the bytes that they move, counted on the meta device.

python -m benchmarks.kernel_count --note "as it is"     seconds for a 3B; the results keep what was counted before

Nothing is computed: every operation that would start a kernel is counted with the bytes of what it reads and writes. So
it says how many kernels the host has to start, and what a GPU moves besides its products of matrices, but no time.
Weights are bfloat16. Under bf16-mixed a weight in float32 is cast besides: it is told how many there are, and how many
bytes one round of casts moves.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # it has no public name

from benchmarks.gpu_model import MODELS, config_of
from benchmarks.launch import machine
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import FlowModule
from flowtrain_lightning.allocator import BACKBONE, ENCODER, ROLES
from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia
from flowtrain_lightning.models import QwenVLM
from flowtrain_lightning.parallel import ReplicatedHalf
from flowtrain_lightning.parallel.halves import half_parameters
from flowtrain_lightning.parallel.ranks.random_streams import own_streams

META = torch.device("meta")
_IMAGE_SIDE = 32  # patches
_TEXT_TOKENS = 256  # with each image
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm")
_STARTS_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


class CountKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that start a kernel.

    Attributes:
        count: name of an operation -> how often it ran.
        moved: name -> bytes that it read and wrote.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and name not in _STARTS_NOTHING:
            touched = {id(one): one for one in _tensors((args, kwargs or {}, result))}
            self.count[name] += 1
            self.moved[name] += sum(one.nbytes for one in touched.values())
        return result

    def summary(self) -> dict[str, Any]:
        """Counts and bytes, products apart from all else."""
        products = {name for name in self.count if name in _PRODUCTS or "attn" in name or "attention" in name}
        others = Counter({name: moved for name, moved in self.moved.items() if name not in products})
        return {
            "operations": self.count.total(),
            "product_bytes": sum(self.moved[name] for name in products),
            "other_bytes": others.total(),
            "most": {name: [self.count[name], moved] for name, moved in others.most_common(6)},
        }


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def count(name: str, recompute: Any, images: int) -> dict[str, Any]:
    """What forward, backward and the end of a step of one microbatch count.

    Args:
        name: one of `benchmarks.gpu_model.MODELS`.
        recompute: of the module.
        images: of the microbatch.
    """
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with META:
            module = QwenVLM(config_of(name), recompute=recompute)
            module.configure_model()
    finally:
        torch.set_default_dtype(former)
    packed, media = microbatch(images, module)
    engines = {role: ReplicatedHalf(half_parameters(module, role)) for role in ROLES}
    trainer = L.Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    compute = Compute(module, trainer, META, engines)
    with CountKernels() as counted, own_streams():
        outputs = compute.encode(ENCODER, media, step=(0, 0), number=0)
        leaves = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in outputs)
        features = as_features(media.modality, leaves)
        loss = compute.microbatch(packed, features, stage="train", step=(0, 0), number=0)
        compute.backward(BACKBONE, (loss,), (torch.ones_like(loss),), last=True)
        compute.backward(ENCODER, outputs, tuple(leaf.grad for leaf in leaves), last=True)
        for engine in engines.values():
            engine.finish_gradients(0.5)
    return {**counted.summary(), **_casts(module)}


def _casts(module: FlowModule) -> dict[str, int]:
    """Weights of products, and the bytes by which all are cast once from float32."""
    kinds = nn.Linear | nn.Conv3d | nn.Conv2d
    weights = [one for part in module.modules() if isinstance(part, kinds) for one in part.parameters()]
    return {"casts": len(weights), "cast_bytes": sum(one.numel() for one in weights) * (4 + 2)}


def microbatch(images: int, module: FlowModule) -> tuple[PackedBatch, PackedMedia]:
    """Square images, each with as many tokens of text, of which half are learned."""
    patches, rows = _IMAGE_SIDE**2, _IMAGE_SIDE**2 // 4
    length = rows + _TEXT_TOKENS
    tokens, place = images * length, torch.arange(images * length) % length
    labels = torch.where(place < length - _TEXT_TOKENS // 2, IGNORED_LABEL, 0)
    packed = PackedBatch(
        tokens=torch.zeros(tokens, dtype=torch.int64),
        labels=labels,
        position_ids=place,
        cu_seqlens=torch.arange(0, tokens + 1, length, dtype=torch.int32),
        max_seqlen=length,
        media_positions={"image": (place < rows).nonzero()[:, 0]},
        samples=tuple(range(images)),
        targets=(labels != IGNORED_LABEL).nonzero()[:, 0],
    )
    tower: Any = module.get_submodule("model.model.visual").config
    media = PackedMedia(
        modality="image",
        pixels=torch.empty(images * patches, tower.in_channels * tower.patch_size**2),
        cu_seqlens=torch.arange(0, images * patches + 1, patches, dtype=torch.int32),
        grid=torch.full((images, 2), _IMAGE_SIDE),
        max_seqlen=patches,
        rows=(rows,) * images,
        sizes=((_IMAGE_SIDE * tower.patch_size, _IMAGE_SIDE * tower.patch_size),) * images,
    )
    return packed, replace(media, inputs=module.prepare_media(media))


def results_text(results: Mapping[str, Any]) -> str:
    """Every count in a row, and of the last one what moves most."""
    lines = dict.fromkeys(f"{note}: {machine_line(run['machine'])}" for note, run in results.items())
    rows = [
        [
            f"{note}, recompute {recompute}",
            f"{found['operations']:,}",
            f"{found['product_bytes'] / 1e9:.0f}",
            f"{found['other_bytes'] / 1e9:.0f}",
        ]
        for note, run in results.items()
        for recompute, found in run["counts"].items()
    ]
    note, run = list(results.items())[-1]
    found = next(iter(run["counts"].values()))
    most = ", ".join(f"{name} {count} times ({moved / 1e9:.0f} GB)" for name, (count, moved) in found["most"].items())
    casts = (
        f"Under bf16-mixed, {found['casts']} weights of products are cast besides, by {found['cast_bytes'] / 1e9:.1f} "
        "GB each time."
    )
    head = ["one microbatch", "operations", "GB of products", "GB of others"]
    return "\n\n".join([*lines, table(head, rows), f"{note}, what moves most: {most}.", casts]) + "\n"


def main() -> None:
    """Count, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-vl-3b")
    parser.add_argument("--images", type=int, default=16, help="of 1,024 patches, each with 512 tokens in all")
    parser.add_argument("--recompute", nargs="+", default=["False", "selective", "True"])
    parser.add_argument("--note", default="as it is", help="what is counted, such as a commit")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    file = options.out / f"kernels-{options.model}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    known = {"True": True, "False": False}
    counts = {each: count(options.model, known.get(each, each), options.images) for each in options.recompute}
    results[options.note] = {"images": options.images, "counts": counts, "machine": machine()}
    text = results_text(results)
    write_results(options.out, file.stem, results, text)
    print(f"{text}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
