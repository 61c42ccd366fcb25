"""Computes one stage's part of a batch, where a whole half computes a method of the user's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.packing.stage_entries import hidden_states
from flowtrain_lightning.parallel.context_parallel import HeadExchange, shared_tokens, with_summed_gradients
from flowtrain_lightning.parallel.halves import HeldStage
from flowtrain_lightning.parallel.stages.late_weights import LateWeight
from flowtrain_lightning.parallel.stages.stage_forward import StageForward


class StageMethod(NamedTuple):
    """A method of the user's that goes through the blocks of a half.

    Attributes:
        call: the method.
        rows: tokens or patches of its first argument: rows of the hidden states.
    """

    call: Callable[..., Any]
    rows: Callable[[Any], int]


class StageStep:
    """A method of the user's, such as ``backbone_step`` or ``encode``, as far as one stage goes.

    Args:
        method: the user's.
        forward: runs the stage.
        exchange: of context ranks, each of which has some of a microbatch's tokens; None where it has all.
    """

    def __init__(
        self,
        method: StageMethod,
        forward: StageForward,
        exchange: HeadExchange | None = None,
    ) -> None:
        self._method = method
        self._forward = forward
        self._exchange = exchange
        self._name = hidden_states(forward.cut.role)
        forward.attach()

    def __call__(self, chunk: int, given: Tensor | None, *inputs: Any) -> Any:
        """One batch.

        Args:
            chunk: which blocks of the stage.
            given: ``[own rows, width]`` hidden states of the stage before; None for the first blocks of the half.
            inputs: of the method, the batch first.

        Returns:
            ``[own rows, width]`` hidden states for the next stage, or on the last stage what the user's method
            returns.

        Raises:
            ValueError: blocks do not give one row for each token or patch.
        """
        with nullcontext() if self._forward.late is None else self._forward.late.for_later():
            found = self._forward(self._method.call, given, *inputs, chunk=chunk)
        if self.ends_in(chunk):
            return found
        own = self._method.rows(inputs[0]) if self._exchange is None else self._exchange.own_tokens
        if found.numel() != own * found.shape[-1]:
            raise ValueError(
                f"The blocks of the {self._forward.cut.role} give {list(found.shape)} for {own} tokens or patches. In "
                "a pipeline they give one row for each: [rows, width], or [1, rows, width]."
            )
        return found.reshape(own, found.shape[-1])

    def first_block(self, chunk: int) -> int:
        """The number of the first of these blocks, among all of the half."""
        return self._forward.cut.chunks[chunk].start

    def ends_in(self, chunk: int) -> bool:
        """Whether these blocks of the stage are the last ones, behind which the method comes to its result."""
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
        hidden, others = self.taken_out(features)
        if hidden is not None:
            with shared_tokens(len(batch.tokens)) as own:
                (summed,) = with_summed_gradients({self._name: hidden}).values()
                assert isinstance(summed, Tensor)
                hidden = hidden if own is None else summed[own]
        found = self._forward(self._method.call, hidden, batch, others, "train", chunk=chunk)
        if self.ends_in(chunk):
            pair: tuple[Tensor, Any] = found
            return pair
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        return wide.square().sum(), found.numel() // found.shape[-1]

    def taken_out(self, features: Features) -> tuple[Tensor | None, Features]:
        """The hidden states that came with features, and the others."""
        given = features.get(self._name)
        assert given is None or isinstance(given, Tensor)
        return given, {name: tensors for name, tensors in features.items() if name != self._name}


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
