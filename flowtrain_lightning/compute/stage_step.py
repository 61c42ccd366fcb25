"""Computes one stage's part of a microbatch, where a whole backbone computes `backbone_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.packing.stage_entries import HIDDEN
from flowtrain_lightning.parallel.halves import HeldStage
from flowtrain_lightning.parallel.stage_forward import StageForward


class StageStep:
    """The user's ``backbone_step``, as far as one stage goes.

    Args:
        method: the user's.
        forward: runs the stage.
    """

    def __init__(self, method: Callable[[PackedBatch, Features, str], Any], forward: StageForward) -> None:
        self._method = method
        self._forward = forward
        forward.attach()

    def __call__(self, batch: PackedBatch, features: Features, stage: str) -> Any:
        """One microbatch.

        Args:
            batch: the microbatch.
            features: those of its media, and under ``HIDDEN`` the hidden states of the stage before.
            stage: of the Trainer.

        Returns:
            ``[tokens, width]`` hidden states for the next stage, or on the last stage what the user's method returns.

        Raises:
            ValueError: blocks do not give one row for each token.
        """
        given = features.get(HIDDEN)
        assert given is None or isinstance(given, Tensor)
        others = {name: tensors for name, tensors in features.items() if name != HIDDEN}
        found = self._forward(self._method, given, batch, others, stage)
        if self._forward.cut.is_last:
            return found
        tokens = len(batch.tokens)
        if found.numel() != tokens * found.shape[-1]:
            raise ValueError(
                f"The blocks of the backbone give {list(found.shape)} for a microbatch of {tokens} tokens. In a "
                "pipeline they give one row for each token: [tokens, width], or [1, tokens, width]."
            )
        return found.reshape(tokens, found.shape[-1])


def where_stages_look(name: str, stage: HeldStage) -> str:
    """Says what to do where a stage has met weights that another one holds.

    Args:
        name: of the user's class.
        stage: that has met them.
    """
    return (
        f"Stage {stage.stage} of {name} has met weights that another stage holds, such as one of "
        f"{', '.join(sorted(stage.absent)[:3])}. Register what runs before the repeated blocks before them, and what "
        "runs behind them behind them: so the first stage holds the one, and the last the other."
    )
