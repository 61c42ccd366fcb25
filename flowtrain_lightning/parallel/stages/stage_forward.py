"""Runs one stage of a half by the user's own method: its blocks on the hidden states that the stage before has made.

The method runs as it is written. Blocks of earlier stages hand on what they are given, the first block of this one
takes the hidden states in its place, and the first block of the next stage ends the forward. What comes before the
blocks is computed on every stage, since positions and the like follow from it; in place of its weights, which the first
stage alone holds, stand numbers that are none (NaN). So what needs them beside the hidden states cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.weak import WeakTensorKeyDictionary

from flowtrain_lightning.parallel.stages.late_weights import LateWeights
from flowtrain_lightning.parallel.stages.stage_cut import StageCut

_CHECKED = 16
"""Forwards after which a stage is asked whether they needed weights that it does not hold."""

_standing_in = False


def computes_with_stand_ins() -> bool:
    """Whether a stage computes what comes before the blocks now, with numbers that are none in place of weights."""
    return _standing_in


class _NextStage(BaseException):
    """The forward has come to the blocks of the next stage; no error, so that no `except` of the user's stops it."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class StageForward:
    """The forwards of one stage.

    Args:
        module: has the half.
        cut: the part that this stage holds.

    Attributes:
        cut: as given.
        late: its linear layers, where backwards leave the gradients of their weights for later; else None.
        column: the ranks of all stages that compute on the same samples, in order of stages; None until the half is in
            its layout.
    """

    def __init__(self, module: nn.Module, cut: StageCut) -> None:
        self.cut = cut
        self.late = LateWeights() if cut.pipeline.splits else None
        self.column: dist.ProcessGroup | None = None
        self._method = _Method(module)
        self._given: Tensor | None = None  # hidden states that the first block takes
        self._own = cut.chunks[0]  # that is computed now
        self._begun = False  # a block of it has run
        self._running = False
        self._looks_left = _CHECKED
        self._hooked = False
        # What the first block was given -> what it takes in its place.
        self._taken: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        here = {number for chunk in cut.chunks for number in chunk}
        for number, path in enumerate(cut.blocks):
            block = module.get_submodule(path)
            if number not in here:
                block.forward = partial(self._pass, number, path)
            elif len(cut.chunks) > 1:
                block.forward = partial(self._pass_or_run, number, path, block.forward)

    @property
    def weights(self) -> Iterator[nn.Parameter]:
        """All parameters of the module; what other ranks hold is on the meta device."""
        return self._method.module.parameters()

    def attach(self) -> None:
        """Lets the first block of the stage take hidden states, before its layout sees them, in which it is by now."""
        if self._hooked:
            return
        if self.late is not None:
            self.late.attach(self._method.module)
        for chunk in self.cut.chunks:
            block = self._method.module.get_submodule(self.cut.blocks[chunk.start])
            block.register_forward_pre_hook(partial(self._begin, chunk), with_kwargs=True, prepend=True)
        self._hooked = True

    def __call__(self, method: Callable[..., Any], given: Tensor | None, *args: Any, chunk: int = 0) -> Any:
        """Runs the method of the user's on this stage.

        Args:
            method: of the module.
            given: ``[tokens, width]`` hidden states; None for the first blocks of the half.
            args: of the method.
            chunk: which blocks of the stage.

        Returns:
            on the last stage what the method returns, on others the hidden states for the next one,
            ``[1, tokens, width]`` or as the blocks have them.

        Raises:
            RuntimeError: the method does not run each block once, in order.
        """
        global _standing_in
        self._own = self.cut.chunks[chunk]
        self._given, self._begun, self._running = given, False, True
        _standing_in = bool(self.cut.before)
        try:
            result = functional_call(self._method, self._stand_ins(), (method, *args))
        except _NextStage as end:
            result = end.hidden
        else:
            if not self._begun or not self.cut.ends_in(chunk):
                raise RuntimeError(
                    f"Stage {self.cut.stage} of {self.cut.stages} ended without coming to all of its blocks, which go "
                    f"on to {self.cut.blocks[self._own.stop - 1]!r}. In a pipeline each forward runs every block."
                )
        finally:
            self._given, self._running = None, False
            _standing_in = False
        if given is not None and self._looks_left > 0:
            self._looks_left -= 1
            self._refuse_other_inputs(result, given)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(
        self, chunk: range, _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Before the first block of a chunk: it takes the hidden states of the stage before."""
        if self._running and chunk != self._own:
            return None
        global _standing_in
        self._begun, _standing_in = True, False
        if chunk.start == 0:
            return None
        hidden = _first(args, kwargs)
        taken = self._taking(hidden) if self._running else self._taken.get(hidden)
        if taken is None:  # it is not what the block was given in its forward
            raise RuntimeError(
                "A block was computed again in a backward by the model's own checkpointing, which does not know the "
                "hidden states of the stage before. Let it checkpoint with use_reentrant=False, or leave that to the "
                "layout: RoleLayout(pipeline=..., recompute='full')."
            )
        if args:
            return (taken, *args[1:]), kwargs
        return args, {**kwargs, next(name for name, value in kwargs.items() if value is hidden): taken}

    def _taking(self, hidden: Tensor) -> Tensor:
        """The hidden states of the stage before, in the form of what the first block is given."""
        assert self._given is not None
        if hidden.numel() != self._given.numel():
            raise RuntimeError(
                f"The blocks of stage {self.cut.stage} are given {list(hidden.shape)}, but the hidden states of the "
                f"stage before are {list(self._given.shape)}. In a pipeline a block takes one row for each token."
            )
        taken = self._given.view(hidden.shape)
        if torch.is_grad_enabled():
            self._taken[hidden] = taken
        return taken

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pass(self, number: int, path: str, *args: Any, **kwargs: Any) -> Any:
        """In place of a block that another stage holds."""
        if not self._running:
            raise RuntimeError(
                f"The block {path!r} was run outside of a step, but this rank holds stage {self.cut.stage} of "
                f"{self.cut.stages}. Load a checkpoint of the run to compute with the whole module."
            )
        hidden = _first(args, kwargs)
        if number >= self._own.stop and self._begun:
            raise _NextStage(hidden)
        if number >= self._own.start or self._begun:
            raise RuntimeError(
                f"The block {path!r} of another stage runs before the blocks of stage {self.cut.stage} have, or after "
                "them. In a pipeline blocks run once, in the order in which they were registered."
            )
        return hidden

    def _pass_or_run(self, number: int, path: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a block that this stage holds: it runs in its chunk's turn, and in a backward."""
        if self._running and number not in self._own:
            return self._pass(number, path, *args, **kwargs)
        return run(*args, **kwargs)

    def _stand_ins(self) -> dict[str, Tensor]:
        """Name -> what stands for a weight before the blocks that the first stage alone holds; without memory."""
        named = dict(self._method.module.named_parameters())
        device = next((each.device for each in named.values() if not each.is_meta), torch.device("cpu"))
        weights = {name: named[name] for name in self.cut.before}
        return {
            f"module.{name}": torch.full((), float("nan"), dtype=weight.dtype, device=device).expand(weight.shape)
            for name, weight in weights.items()
        }

    def _refuse_other_inputs(self, result: Any, given: Tensor) -> None:
        made = result if isinstance(result, tuple) else (result,)
        spoilt = any(bool(torch.isnan(each).any()) for each in made if isinstance(each, Tensor))
        if spoilt and not bool(torch.isnan(given).any()):
            raise RuntimeError(
                f"What stage {self.cut.stage} of the {self.cut.role} computes needs weights of the first stage beside "
                f"the hidden states, such as {min(self.cut.before)!r}. In a pipeline blocks take one tensor that those "
                "before them have computed; what runs behind the blocks is registered behind them."
            )


class _Method(nn.Module):
    """Runs methods of a module as a forward, in which weights can be replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: Callable[..., Any], *args: Any) -> Any:
        """``method(*args)``."""
        return method(*args)


def _first(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The first tensor that a block is given: hidden states."""
    found = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if found is None or (args and found is not args[0]):
        raise RuntimeError("A block of a pipeline takes hidden states, a tensor, as its first argument.")
    return found
