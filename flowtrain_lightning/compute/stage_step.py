"""Computes one stage's part of a microbatch, where a whole backbone computes `backbone_step`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.packing.stage_entries import HIDDEN
from flowtrain_lightning.parallel.context_parallel import HeadExchange, shared_tokens, with_summed_gradients
from flowtrain_lightning.parallel.halves import HeldStage
from flowtrain_lightning.parallel.stages.late_weights import LateWeight
from flowtrain_lightning.parallel.stages.stage_forward import StageForward


class StageStep:
    """The user's ``backbone_step``, as far as one stage goes.

    Args:
        method: the user's.
        forward: runs the stage.
        exchange: of context ranks, each of which has some of a microbatch's tokens; None where it has all.
    """

    def __init__(
        self,
        method: Callable[[PackedBatch, Features, str], Any],
        forward: StageForward,
        exchange: HeadExchange | None = None,
    ) -> None:
        self._method = method
        self._forward = forward
        self._exchange = exchange
        forward.attach()

    def __call__(self, batch: PackedBatch, features: Features, stage: str, chunk: int = 0) -> Any:
        """One microbatch.

        Args:
            batch: the microbatch.
            features: those of its media, and under ``HIDDEN`` the hidden states of the stage before.
            stage: of the Trainer.
            chunk: which blocks of the stage.

        Returns:
            ``[own tokens, width]`` hidden states for the next stage, or on the last stage what the user's method
            returns.

        Raises:
            ValueError: blocks do not give one row for each token.
        """
        with nullcontext() if self._forward.late is None else self._forward.late.for_later():
            found = self._run(batch, features, stage, chunk)
        if self.ends_in(chunk):
            return found
        tokens = len(batch.tokens) if self._exchange is None else self._exchange.own_tokens
        if found.numel() != tokens * found.shape[-1]:
            raise ValueError(
                f"The blocks of the backbone give {list(found.shape)} for a microbatch of {tokens} tokens. In a "
                "pipeline they give one row for each token: [tokens, width], or [1, tokens, width]."
            )
        return found.reshape(tokens, found.shape[-1])

    def ends_in(self, chunk: int) -> bool:
        """Whether these blocks of the stage are the last ones, behind which the loss is computed."""
        return self._forward.cut.ends_in(chunk)

    def leaving(self, left: list[LateWeight]) -> AbstractContextManager[None]:
        """Inside, a backward leaves the gradients of weights."""
        assert self._forward.late is not None, "its schedule splits backwards"
        return self._forward.late.left_in(left)

    def on_trial(self, batch: PackedBatch, features: Features, chunk: int) -> tuple[Tensor, Any]:
        """A piece of a microbatch by itself, for `ContextCheck`: context ranks share it, or each computes all of it.

        Args:
            batch: the piece.
            features: as they are given to the stage, the hidden states of all tokens.
            chunk: which blocks of the stage.

        Returns:
            on the last stage what the user's method returns, on others a sum over what the stage makes of each token,
            and their number.
        """
        if isinstance(hidden := features.get(HIDDEN), Tensor):
            with shared_tokens(len(batch.tokens)) as own:
                summed = with_summed_gradients({HIDDEN: hidden})[HIDDEN]
                assert isinstance(summed, Tensor)
                features = {**features, HIDDEN: hidden if own is None else summed[own]}
        found = self._run(batch, features, "train", chunk)
        if self.ends_in(chunk):
            pair: tuple[Tensor, Any] = found
            return pair
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        return wide.square().sum(), found.numel() // found.shape[-1]

    def _run(self, batch: PackedBatch, features: Features, stage: str, chunk: int) -> Any:
        given = features.get(HIDDEN)
        assert given is None or isinstance(given, Tensor)
        others = {name: tensors for name, tensors in features.items() if name != HIDDEN}
        return self._forward(self._method, given, batch, others, stage, chunk=chunk)


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
