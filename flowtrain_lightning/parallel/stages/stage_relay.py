"""Runs one forward through all stages of a half, one after another, where each next token needs all layers.

Hidden states pass from rank to rank inside of the forward, not through the pool: the ranks of all stages come to it
together. No two stages compute at the same time, so this is for looking at what a model has learned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flowtrain_lightning.parallel.stages.stage_forward import StageForward

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class StageRelay:
    """Forwards in which the ranks of all stages take part.

    Args:
        forward: runs the stage of this rank.
    """

    def __init__(self, forward: StageForward) -> None:
        assert forward.column is not None, "the half is in its layout"
        self._forward = forward
        self._column = forward.column
        self._sent: tuple[int, torch.dtype] | None = None  # width and type of hidden states
        self._given: tuple[int, torch.dtype] | None = None

    def __call__(self, scores: Callable[[], Tensor], choose: Callable[[Tensor], Tensor], tokens: int) -> Tensor:
        """One forward.

        Args:
            scores: runs the half as if it were whole.
            choose: of what the last stage returns, ``[chosen]`` int64.
            tokens: of the microbatch.

        Returns:
            what was chosen, on all stages.
        """
        cut = self._forward.cut
        device = next(weight.device for weight in self._forward.weights if not weight.is_meta)
        found = self._forward(scores, None if cut.stage == 0 else self._received(tokens, device))
        if cut.is_last:
            chosen = choose(found)
        else:
            self._send(found.reshape(tokens, found.shape[-1]))
            chosen = torch.empty(0, dtype=torch.int64, device=device)
        count = torch.tensor([len(chosen)], device=device)
        dist.broadcast(count, group_src=cut.stages - 1, group=self._column)
        chosen = chosen if cut.is_last else chosen.new_empty(int(count))
        if len(chosen):
            dist.broadcast(chosen, group_src=cut.stages - 1, group=self._column)
        return chosen

    def _send(self, hidden: Tensor) -> None:
        stage = self._forward.cut.stage
        if self._sent is None:
            self._sent = hidden.shape[1], hidden.dtype
            told = torch.tensor([hidden.shape[1], _DTYPES.index(hidden.dtype)], device=hidden.device)
            dist.send(told, group_dst=stage + 1, group=self._column)
        dist.send(hidden.detach().contiguous(), group_dst=stage + 1, group=self._column)

    def _received(self, tokens: int, device: torch.device) -> Tensor:
        stage = self._forward.cut.stage
        if self._given is None:
            told = torch.empty(2, dtype=torch.int64, device=device)
            dist.recv(told, group_src=stage - 1, group=self._column)
            width, number = told.tolist()
            self._given = width, _DTYPES[number]
        width, dtype = self._given
        hidden = torch.empty(tokens, width, dtype=dtype, device=device)
        dist.recv(hidden, group_src=stage - 1, group=self._column)
        return hidden
