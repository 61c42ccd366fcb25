"""Inside of microbatches and encoder batches the host never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ROLES, default_allocation
from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.models import block_attention, huggingface_vlm
from flowtrain_lightning.models.block_attention import SightMask
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel import ReplicatedHalf, clip_to_norm
from flowtrain_lightning.parallel.blocks import compile_blocks
from flowtrain_lightning.parallel.halves import half_parameters
from flowtrain_lightning.parallel.ranks.random_streams import own_streams
from flowtrain_lightning.runtime.runner import RoleRunner
from recipes.quickstart.module import QuickstartVLM
from tests.tiny import IMAGES, tiny_data, write_records
from tests.waits import NeverWaiting, ReadingOnce, Waits

pytest.importorskip("transformers")
from tests.models.tiny import FAMILIES

META = torch.device("meta")
MODELS = ["qwen2_5_vl", "qwen3_vl_moe", "llava with siglip"]
MODELS += [pytest.param(name, marks=pytest.mark.full) for name in ("qwen2_vl", "qwen3_vl", "llava with clip")]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 8)
    return folder


def quickstart() -> tuple[FlowModule, ImageProcessor]:
    return QuickstartVLM(patch_dim=IMAGES.patch_dim, encoder_width=16, encoder_depth=2, backbone_width=16), IMAGES


def family(name: str) -> tuple[FlowModule, ImageProcessor]:
    chosen = FAMILIES[name]
    return chosen.kind(chosen.config, recompute=name == "qwen3_vl"), chosen.images


def run_step(
    module: FlowModule,
    images: ImageProcessor,
    records: Path,
    device: torch.device = META,
    never_waiting: Callable[[], AbstractContextManager[Any]] = NeverWaiting,
) -> list[str]:
    """A step's encoder batches and microbatches, forward and backward, by default where nothing can be read."""
    data = tiny_data(records, images=images, global_batch_size=8)
    data.prepare_data()
    data.setup("fit")
    module.configure_model()
    module.to(torch.bfloat16)
    # The loader would do it; here no Trainer has told it of the module.
    prepare_media = module.prepare_media
    batch = next(iter(data.train_dataloader()))
    on_device = {id(p): nn.Parameter(p.detach().to(device), p.requires_grad) for p in module.parameters()}
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            setattr(part, name, on_device[id(weight)])
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))
    trainer = L.Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    engines = {role: ReplicatedHalf(half_parameters(module, role)) for role in ROLES}
    compute, done = Compute(module, trainer, device, engines), []
    for number, (packed, media) in enumerate(zip(batch.microbatches, batch.media["encoder"], strict=True)):
        features = {}
        if media is not None:
            media = replace(media, inputs=prepare_media(media))
        with never_waiting(), own_streams():
            if media is not None:
                outputs = compute.encode(ENCODER, media, step=(0, 0), number=number)
                leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in outputs)
                features = as_features(media.modality, leaves)
                done.append(ENCODER)
            loss = compute.microbatch(packed, features, stage="train", step=(0, 0), number=number)
            compute.backward(BACKBONE, (loss,), (torch.ones_like(loss),), last=True)
            done.append(BACKBONE)
            if media is not None:
                compute.backward(ENCODER, outputs, tuple(leaf.grad for leaf in leaves), last=True)
    assert all(p.grad is not None for p in half_parameters(module, BACKBONE) if p.requires_grad)
    return done


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_hugging_face_model_never_waits(records, name):
    done = run_step(*family(name), records)
    assert ENCODER in done
    assert BACKBONE in done


@pytest.mark.parametrize("name", ["gemma3", pytest.param("paligemma 2", marks=pytest.mark.full)])
def test_nor_does_one_whose_tokens_see_each_other(records, monkeypatch, name):
    """With a stand-in for the kernel itself, which PyTorch has for GPUs alone."""

    def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, **options: Any) -> Tensor:
        assert block_mask.kv_indices.is_meta
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    monkeypatch.setattr(block_attention, "compiled_flex_attention", lambda: attend)
    sparsely = partialmethod(SightMask.attend_sparsely, compiled=True)
    monkeypatch.setattr(SightMask, "attend_densely", sparsely)
    assert {ENCODER, BACKBONE} <= set(run_step(*family(name), records))


@pytest.mark.full
def test_compiled_layers_are_in_one_piece_each_and_never_compiled_anew(records, monkeypatch):
    compiled = CompileCounter()
    monkeypatch.setattr(huggingface_vlm, "compile_blocks", lambda model: compile_blocks(model, backend=compiled))
    chosen = FAMILIES["qwen2_5_vl"]
    torch._dynamo.reset()
    counters.clear()
    done = run_step(chosen.kind(chosen.config, compile="blocks"), chosen.images, records)
    assert done.count(BACKBONE) > 1, "microbatches of several numbers of tokens"
    assert not counters["graph_break"]
    assert compiled.frame_count == 4, "of both halves the first layer, whose input needs no gradient, and all others"
    torch._dynamo.reset()


def test_the_roles_of_a_rank_share_no_stream_for_copies():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    copies = Compute(quickstart()[0], trainer, META, dict.fromkeys(ROLES)).copies
    assert not set(map(id, copies[ENCODER])) & set(map(id, copies[BACKBONE]))


def test_a_step_of_the_quickstart_never_waits(records):
    assert {ENCODER, BACKBONE} <= set(run_step(*quickstart(), records))


@pytest.mark.parametrize("lacks", [False, True])
def test_sums_over_ranks_are_read_only_where_this_one_has_not_used_all(monkeypatch, lacks):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    parameters = [nn.Parameter(torch.ones(3, device=META)) for _ in range(3)]
    for parameter in parameters[lacks:]:
        parameter.grad = torch.ones(3, device=META)
    half = ReplicatedHalf(parameters)
    with ReadingOnce() as device:
        half.begin_step()
        half.finish_gradients(0.5)
    assert device.reads == lacks
    assert all(parameter.grad is not None for parameter in parameters), "the other rank has used all"


@pytest.mark.parametrize(("listeners", "of_others"), [((), 0), ((1,), 1)], ids=["all halves here", "others elsewhere"])
def test_the_norm_is_read_only_where_other_ranks_have_the_other_half(listeners, of_others):
    half = ReplicatedHalf([nn.Parameter(torch.ones(3, device=META)) for _ in range(2)])
    for parameter in half.parameters:
        parameter.grad = torch.ones(3, device=META)
    allocation = default_allocation(2, "separate", 1)
    cross: Any = SimpleNamespace(all_reduce=lambda squares: squares)
    job = SimpleNamespace(rank=0, allocation=allocation, groups=SimpleNamespace(cross=cross))
    rank: Any = SimpleNamespace(
        _engines={BACKBONE: half}, _listeners=listeners, _training_roles=lambda: [ENCODER], _job=job, trunk=BACKBONE
    )
    with ReadingOnce() as device:
        norm = RoleRunner.gradient_norm(rank, half.parameters)
        clip_to_norm([p.grad for p in half.parameters if p.grad is not None], 1.0, norm)
    assert device.reads == of_others


def test_what_ranks_have_agreed_on_is_logged_on_the_host(monkeypatch):
    logged = {}
    monkeypatch.setattr(L.LightningModule, "log", lambda _, name, value, **options: logged.update({name: value}))
    monkeypatch.setattr(QuickstartVLM, "device", META)
    with NeverWaiting():
        loss = quickstart()[0].log_report(
            "train", StepReport(2.0, 4.0, False, {"accuracy": 0.5}, weights={"accuracy": 3})
        )
    assert (loss, logged["train_loss"], logged["accuracy"]) == (2.0, 2.0, 0.5)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0).__setitem__(x > 0, 1.0),
        lambda x: bool(x.any()),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.arange(3).to(x.device),
        lambda x: x.cpu(),
        lambda x: torch.unique(x),
    ],
)
def test_whatever_waits_is_noticed(waiting):
    with NeverWaiting(), pytest.raises((Waits, RuntimeError, NotImplementedError)):
        waiting(torch.empty(4, device=META))


def test_what_goes_on_by_itself_is_allowed():
    with NeverWaiting():
        moved = torch.arange(3).to(META, non_blocking=True)
        assert torch.zeros(3, device=META).index_add(0, moved, torch.ones(3, device=META)).is_meta
