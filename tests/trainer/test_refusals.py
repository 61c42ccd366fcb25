"""What is refused where ranks hold shards of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.allocator import Allocation, AllocationError, Layout
from flowtrain_lightning.callbacks import AverageWeights
from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.parallel.blocks import recompute_in_backward
from flowtrain_lightning.trainer.callback_refusals import refuse_averages_of_runs
from flowtrain_lightning.trainer.optimizer_refusals import refuse_optimizers, refuse_optimizers_of_shares
from flowtrain_lightning.trainer.refusals import (
    refuse_frozen_backbone,
    refuse_layers_computed_again,
    refuse_precision_of_deepspeed,
    refuse_scalars_in_shards,
    refuse_sharded_before,
    refuse_sparse_gradients,
    refuse_unshared_sequences,
)
from tests.exactness.hearing import SeeingAndHearing, memory_data
from tests.tiny import TinyVLM


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """A module in shards, of which one rank holds all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    yield module
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_that_needs_whole_weights_is_refused_on_shards(sharded: nn.Module, kind: Any) -> None:
    matrices = [parameter for parameter in sharded.parameters() if parameter.ndim == 2]
    with pytest.raises(TypeError, match=f"{kind.__name__} is not known to treat every element .* Use one of SGD, Adam"):
        refuse_optimizers([kind(matrices, lr=0.1)])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_kernel_that_takes_no_shards_is_refused(sharded: nn.Module, kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(fused=True\) was given, .* Leave `fused` out"):
        refuse_optimizers([kind(sharded.parameters(), lr=0.1, fused=True)])


class Prodigy(torch.optim.SGD):
    """Of the name of an optimizer that takes one size of steps from all weights."""


class Lamb(torch.optim.SGD):
    """Clips by itself, as some do."""

    def __init__(self, *args: Any, max_grad_norm: float | None = 1.0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.param_groups[0]["max_grad_norm"] = max_grad_norm


def test_an_optimizer_that_couples_weights_is_refused_where_some_are_on_other_ranks() -> None:
    whole = [*nn.Linear(2, 2).parameters()]
    split = [*whole, *nn.Linear(2, 2, device="meta").parameters()]
    refuse_optimizers([Prodigy(whole, lr=0.1), Lamb(whole, lr=0.1), Lamb(split, lr=0.1, max_grad_norm=None)])
    with pytest.raises(TypeError, match="Prodigy takes its step's size from all weights together"):
        refuse_optimizers([Prodigy(split, lr=0.1)])
    with pytest.raises(TypeError, match=r"Lamb\(max_grad_norm=...\) clips by the norm of its own rank"):
        refuse_optimizers([Lamb(split, lr=0.1)])


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_an_optimizer_of_elements_is_taken_on_shards(sharded: nn.Module, options: dict[str, bool]) -> None:
    refuse_optimizers([torch.optim.AdamW(sharded.parameters(), lr=0.1, **options)])


def test_a_module_that_another_trainer_has_left_in_shards_is_refused(sharded: nn.Module) -> None:
    with pytest.raises(ValueError, match="The weight 'weight' is in shards, which an earlier run of another Trainer"):
        refuse_sharded_before(sharded)


def test_a_frozen_and_sharded_backbone_beside_an_encoder_that_trains_is_refused() -> None:
    module = TinyVLM()
    module.configure_model()
    module.backbone.requires_grad_(False)
    layouts = {"encoder": Layout(1), "backbone": Layout(2, shard="fsdp")}
    with pytest.raises(ValueError, match="All weights of the backbone are frozen and sharded"):
        refuse_frozen_backbone(layouts, module)
    refuse_frozen_backbone({**layouts, "backbone": Layout(2)}, module)
    module.encoder.requires_grad_(False)
    refuse_frozen_backbone(layouts, module)


@pytest.mark.parametrize("shard", ["fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"])
def test_a_parameter_without_a_dimension_cannot_be_shared(shard: Any) -> None:
    class Scaled(TinyVLM):
        def configure_backbone(self) -> None:
            super().configure_backbone()
            self.backbone.block.scale = nn.Parameter(torch.tensor(1.0))

    module = Scaled()
    module.configure_model()
    layouts = {"encoder": Layout(2, shard=shard), "backbone": Layout(2)}
    refuse_scalars_in_shards(layouts, module)
    with pytest.raises(ValueError, match=rf"'backbone.block.scale' has no dimension, .*{shard}.*torch.zeros\(1\)"):
        refuse_scalars_in_shards({**layouts, "backbone": Layout(2, shard=shard)}, module)


def test_layers_that_a_module_recomputes_itself_do_not_go_with_activation_bytes() -> None:
    module, both = TinyVLM(), dict.fromkeys(("encoder", "backbone"), Layout())
    module.configure_model()
    free = Allocation("colocated", both, dict.fromkeys(both, (0,)), order="searched")
    limited = replace(free, activation_bytes=1e9)
    refuse_layers_computed_again(limited, module)
    recompute_in_backward(module.backbone.block, "full")
    refuse_layers_computed_again(free, module)
    with pytest.raises(ValueError, match=r"but TinyVLM lets 'backbone.block' compute again by itself"):
        refuse_layers_computed_again(limited, module)


def test_a_parameter_without_an_element_cannot_be_shared() -> None:
    module = TinyVLM()
    module.configure_model()
    module.backbone.block.rest = nn.Parameter(torch.zeros(0, 4))
    layouts = {"encoder": Layout(2, shard="fsdp"), "backbone": Layout(2)}
    refuse_scalars_in_shards(layouts, module)
    with pytest.raises(ValueError, match=r"'backbone.block.rest' has no element, .*'fsdp'"):
        refuse_scalars_in_shards({**layouts, "backbone": Layout(2, shard="fsdp")}, module)


def test_sparse_gradients_are_refused_where_several_ranks_would_sum_them() -> None:
    module = TinyVLM()
    module.configure_model()
    module.backbone.embed = nn.Embedding(8, 4, sparse=True)
    layouts = {"encoder": Layout(2), "backbone": Layout(1)}
    refuse_sparse_gradients(layouts, module)
    with pytest.raises(ValueError, match=r"'backbone\.embed' has sparse=True, but the backbone has 2 ranks"):
        refuse_sparse_gradients({**layouts, "backbone": Layout(1, pipeline=2)}, module)
    module.backbone.embed.requires_grad_(False)
    refuse_sparse_gradients({**layouts, "backbone": Layout(2)}, module)


def test_sequences_that_nobody_slices_are_refused_with_context_ranks() -> None:
    layouts = {"encoder": Layout(1), "backbone": Layout(1, context=2)}
    refuse_unshared_sequences({**layouts, "backbone": Layout(2)}, TinyVLM())
    with pytest.raises(ValueError, match="TinyVLM does not say how its sequences are sliced"):
        refuse_unshared_sequences(layouts, TinyVLM())

    class Slicing(TinyVLM):
        def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
            return arguments

    refuse_unshared_sequences(layouts, Slicing())

    class Stepping(Slicing):
        def backbone_step(self, batch: PackedBatch, features: Features, stage: str) -> Any:
            return super().backbone_step(batch, features, stage)

    with pytest.raises(ValueError, match="Stepping overrides backbone_step"):
        refuse_unshared_sequences(layouts, Stepping())


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_precision_that_deepspeed_does_not_have_here_is_refused(precision):
    layouts = {"encoder": Layout(2), "backbone": Layout(2, shard="deepspeed-2")}
    with pytest.raises(ValueError, match=rf"backbone has shard 'deepspeed-2' .*{precision}.* Take precision '32-true'"):
        refuse_precision_of_deepspeed(layouts, precision)
    refuse_precision_of_deepspeed(layouts, "bf16-mixed")
    refuse_precision_of_deepspeed({**layouts, "backbone": Layout(2, shard="fsdp")}, precision)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Adagrad])
def test_an_optimizer_that_cannot_step_a_share_is_refused(kind):
    weights = list(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match=f"{kind.__name__} was given, but DeepSpeed optimizes a half.* Use one of SGD"):
        refuse_optimizers_of_shares([kind(weights)])
    refuse_optimizers_of_shares([torch.optim.AdamW(weights)])


class OwnAverages(AverageWeights):
    """A user's, derived from ours."""


@pytest.mark.parametrize("callback", [AverageWeights, OwnAverages])
def test_averages_of_weights_in_shards_of_deepspeed_are_refused(callback: type[AverageWeights]):
    layouts = {"encoder": Layout(2, shard="deepspeed-3"), "backbone": Layout(2)}
    with pytest.raises(ValueError, match=r"AverageWeights was given, but the encoder has shard 'deepspeed-3'"):
        refuse_averages_of_runs(layouts, [callback()])
    refuse_averages_of_runs(layouts, [])
    refuse_averages_of_runs({**layouts, "encoder": Layout(2, shard="deepspeed-2")}, [AverageWeights()])


def test_an_encoder_without_a_rank_is_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [__file__])  # which other ranks could run again
    strategy = FlowTrainStrategy(encoder_ranks={"encoder_image": 1})
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=strategy, logger=False)
    with pytest.raises(AllocationError, match=r"give each role that encodes .encoder_image, encoder_audio. at least 1"):
        trainer.fit(SeeingAndHearing(), memory_data())
