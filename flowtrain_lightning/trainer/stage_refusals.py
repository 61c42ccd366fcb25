"""Refuses what does not go with a pipeline, before any rank has built or trained a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.stages.stage_cut import cut_half

_CALLBACKS = {
    "AdaptCosts": "it measures whole microbatches, of which a rank computes a stage",
    "FlowReplan": "it measures whole microbatches, of which a rank computes a stage",
}
"""Callbacks of flowtrain, and why they do not go with stages."""


def refuse_beside_stages(layouts: Mapping[str, Layout], module: FlowModule, trainer: L.Trainer) -> None:
    """Raises for settings that do not go with a pipeline.

    Args:
        layouts: role -> its layout.
        module: that runs.
        trainer: runs it.

    Raises:
        ValueError: names the setting, and what to do.
    """
    for role, layout in layouts.items():
        if layout.pipeline > 1:
            given = f"The {role} has pipeline {layout.pipeline}, but"
            _refuse_settings(given, module, trainer)
            parts = [part for path in module.halves[role] for part in module.get_submodule(path).modules()]
            if role == module.role_graph.trunk:
                _refuse_beside_trunk(given, layout, parts, module, trainer)
            else:
                _refuse_beside_encoder(given, parts, trainer)


def _refuse_settings(given: str, module: FlowModule, trainer: L.Trainer) -> None:
    """Raises for what does not go with stages of any role."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__module__.startswith("flowtrain_lightning.") and kind.__name__ in _CALLBACKS:
                raise ValueError(
                    f"{given} the callback {kind.__name__} was given: {_CALLBACKS[kind.__name__]}. Leave it out, or "
                    "set pipeline to 1."
                )
    if module.hparams.get("compile", "none") != "none":
        raise ValueError(
            f"{given} compile={module.hparams['compile']!r} was given, which has not been tried on stages. Leave it "
            "out, or set pipeline to 1."
        )


def _refuse_beside_trunk(
    given: str, layout: Layout, parts: Sequence[nn.Module], module: FlowModule, trainer: L.Trainer
) -> None:
    _refuse_absent_weights(layout, module, given)
    answers = any(type(callback).__name__ == "EvaluateAnswers" for callback in trainer.callbacks)  # type: ignore[attr-defined]
    generates = trainer.state.fn == TrainerFn.PREDICTING or answers
    if generates and (chunks := layout.stages.chunks) > 1:
        raise ValueError(
            f"{given} {chunks} runs of layers in each stage, and predictions go through each stage once. Leave virtual "
            "and 'zb-v' out for them; checkpoints load into every layout."
        )
    if generates and (own := _own_generation(module)):
        raise ValueError(
            f"{given} {type(module).__name__} defines {own}, and predictions need all layers for each token, where a "
            f"rank has those of one stage. Leave {own} to the package, whose stages take part in each forward, or "
            "predict on a layout without a pipeline; checkpoints load into every layout."
        )
    packing = getattr(trainer.datamodule, "packing", None)  # type: ignore[attr-defined]
    if getattr(packing, "pad_to_budget", False):
        raise ValueError(
            f"{given} PackingConfig(pad_to_budget=True) was given: what passes between stages is planned without "
            "padding. Leave it out."
        )
    again = any(getattr(part, "gradient_checkpointing", False) is True for part in parts)
    if layout.tensor > 1 and again:
        raise ValueError(
            f"{given} beside tensor {layout.tensor} the model computes its layers again by itself (gradient "
            "checkpointing), where it would take them for those of a later microbatch. Leave recompute=True out and "
            "give the layout recompute='full'."
        )


def _refuse_beside_encoder(given: str, parts: Sequence[nn.Module], trainer: L.Trainer) -> None:
    if getattr(trainer.datamodule, "keep_features", None) is not None:  # type: ignore[attr-defined]
        raise ValueError(
            f"{given} FlowDataModule(keep_features=...) was given: what one stage makes of a batch of which some "
            "features are kept is not planned. Leave it out, or set pipeline to 1."
        )
    if any(getattr(part, "deepstack_visual_indexes", None) for part in parts):
        raise ValueError(
            f"{given} features leave its tower behind several layers (deepstack_visual_indexes), which one stage alone "
            "has. Set pipeline to 1."
        )


def _refuse_absent_weights(layout: Layout, module: FlowModule, given: str) -> None:
    """Raises where a stage needs a weight that it does not hold, as the packing check found."""
    stages = range(layout.pipeline) if module.needed_weights else ()
    cuts = [cut_half(module, module.role_graph.trunk, stage, layout.stages) for stage in stages]
    for number, weight in module.needed_weights:
        blocks = cuts[0].blocks
        place = min(number, len(blocks) - 1) if number >= 0 else len(blocks) - 1
        cut = next(cut for cut in cuts if any(place in chunk for chunk in cut.chunks))
        if weight in cut.absent:
            raise ValueError(
                f"{given} {weight!r} is needed beside the hidden states at the block {blocks[place]!r}, whose stage "
                f"{cut.stage} does not hold it. Let blocks take what those before them have computed, and else what "
                "follows from tokens and features; register what runs before all blocks before them, and what runs "
                "behind them behind them; or set pipeline to 1."
            )


def _own_generation(module: FlowModule) -> str:
    """The method of the user's that generates, where it is not one of this package's; else nothing."""
    for name in ("generate", "backbone_step"):
        if not getattr(type(module), name).__module__.startswith("flowtrain_lightning."):
            return name
    return ""
