"""What does not go with stages is refused before the first step, by the setting's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.callbacks import AdaptCosts, EvaluateAnswers, FlowReplan
from flowtrain_lightning.data import KeepFeatures, PackingConfig
from flowtrain_lightning.packing_check.needed_weights import NeededWeight
from flowtrain_lightning.trainer.stage_refusals import refuse_beside_stages
from tests.exactness.modules import Deep
from tests.tiny import TinyVLM, tiny_data, write_records

STAGES = {"encoder": Layout(1), "backbone": Layout(1, pipeline=2)}


class LateBloomer(FlowReplan):
    """A callback of the user's that derives from one."""


def refused(module: L.LightningModule, callbacks: list[Any] | None = None, data: Any = None, **degrees: Any) -> str:
    trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False)
    trainer.datamodule = data
    refuse_beside_stages({**STAGES, "backbone": Layout(2)}, module, trainer)  # all of it goes with a whole backbone
    with pytest.raises(ValueError, match=r"^The backbone has pipeline 2, but ") as error:
        refuse_beside_stages({**STAGES, "backbone": Layout(1, pipeline=2, **degrees)}, module, trainer)
    return str(error.value)


@pytest.fixture
def module() -> TinyVLM:
    built = TinyVLM()
    built.configure_model()
    return built


def test_nothing_else_is(module):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    refuse_beside_stages(STAGES, module, trainer)
    trainer.state.fn = TrainerFn.PREDICTING
    refuse_beside_stages(STAGES, module, trainer)


@pytest.mark.parametrize("name", ["generate", "backbone_step"])
def test_generation_by_methods_of_the_users_is(name: str):
    own = type("Own", (TinyVLM,), {name: lambda self, *_: None})()
    own.configure_model()
    assert f"Own defines {name}, and predictions need all layers" in refused(own, [EvaluateAnswers()])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    refuse_beside_stages(STAGES, own, trainer)


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (AdaptCosts(), "AdaptCosts"),
        (FlowReplan(), "FlowReplan"),
        (LateBloomer(), "FlowReplan"),
    ],
)
def test_callbacks_that_need_whole_microbatches_or_layers_are(module, callback: L.Callback, name: str):
    assert f"the callback {name} was given" in refused(module, [callback])


def test_padding_to_the_budget_is(module, tmp_path: Path):
    write_records(tmp_path, 2)
    data = tiny_data(tmp_path, packing=PackingConfig(pad_to_budget=True))
    assert "PackingConfig(pad_to_budget=True) was given" in refused(module, data=data)


def test_weights_that_a_stage_needs_and_another_one_holds_are():
    module = Deep()
    module.configure_model()
    module.needed_weights = (NeededWeight(1, "backbone.place.weight"),)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    refuse_beside_stages(STAGES, module, trainer)  # that block is on the first stage
    module.needed_weights = (NeededWeight(0, "backbone.place.weight"), NeededWeight(-1, "backbone.place.weight"))
    said = refused(module)
    assert "'backbone.place.weight' is needed beside the hidden states at the block 'backbone.more.2'" in said
    assert "whose stage 1 does not hold it" in said
    module.needed_weights = (NeededWeight(2, "backbone.embed.weight"),)
    refuse_beside_stages(STAGES, module, trainer)  # the last stage has the tied head
    with pytest.raises(ValueError, match=r"at the block 'backbone\.more\.1', whose stage 2 does not hold it"):
        refuse_beside_stages({**STAGES, "backbone": Layout(1, pipeline=4)}, module, trainer)


def test_compiled_layers_are(module):
    module.hparams["compile"] = "blocks"
    assert "compile='blocks' was given" in refused(module)


@pytest.mark.parametrize("runs", [{"virtual": 2}, {"schedule": "zb-v"}])
def test_predictions_in_stages_of_several_runs_are(module, runs):
    assert "2 runs of layers in each stage, and predictions" in refused(module, [EvaluateAnswers()], **runs)


def test_features_that_are_kept_are_beside_an_encoder_in_stages(module, tmp_path: Path):
    write_records(tmp_path, 2)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.datamodule = tiny_data(tmp_path, keep_features=KeepFeatures(tmp_path / "features"))
    refuse_beside_stages(STAGES, module, trainer)
    with pytest.raises(ValueError, match=r"^The encoder has pipeline 2, but FlowDataModule\(keep_features"):
        refuse_beside_stages({**STAGES, "encoder": Layout(1, pipeline=2)}, module, trainer)


def test_features_that_leave_behind_several_layers_of_an_encoder_are(module):
    module.encoder.deepstack_visual_indexes = [0, 1]
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    refuse_beside_stages(STAGES, module, trainer)
    with pytest.raises(ValueError, match=r"^The encoder has pipeline 2, but features leave its tower behind several"):
        refuse_beside_stages({**STAGES, "encoder": Layout(1, pipeline=2)}, module, trainer)


def test_a_models_own_checkpointing_is_beside_tensor_ranks_alone(module):
    module.backbone.gradient_checkpointing = True
    assert "give the layout recompute='full'" in refused(module, tensor=2)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    refuse_beside_stages(STAGES, module, trainer)
