"""`HalfEngine`: the interface by which the runtime knows every layout of a role."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class StepRecord:
    """The part of a half that one rank has used in a step that trains.

    Attributes:
        layers: a digest of the layers that were gathered by themselves, in order; ranks that share weights must have
            gathered the same.
        unused: parameters that have a gradient, by number, though this rank has not used them. A layout that finds out
            by itself what nobody has used names none.
    """

    layers: str = ""
    unused: Collection[int] = ()


class HalfEngine(Protocol):
    """Puts a layout onto one half of a module, and keeps the half's gradients right.

    A step goes: ``begin_step``, forwards by ``call``, each backward inside ``backward``, ``finish_gradients``. After it
    the gradients of a parameter are the sum over all samples of the step times ``scale``, as one process would have
    them, in whatever form the layout keeps the parameter. A parameter that no rank used keeps ``grad = None``.

    Attributes:
        parameters: of the half, as this rank holds them, in the module's order; where ranks share what the optimizer
            does and not the weights, what it steps in their place.
        in_lockstep: the ranks that share weights must run forwards and backwards in one order.
    """

    parameters: list[nn.Parameter]
    in_lockstep: bool

    @property
    def record(self) -> StepRecord:
        """This rank's record for the ranks with which it shares weights, after the step's last backward.

        It is for the caller to compare it, and to take away the gradients that nobody has used, before
        ``finish_gradients``.
        """

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""

    def begin_step(self) -> None:
        """Before the first forward of a step that trains."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward: a method of the user's module that computes with this half."""

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Inside, one backward runs.

        Args:
            last: the step's last one on this rank; what can be reduced meanwhile is.
        """

    def send_gradients(self) -> None:
        """After the step's last backward on this rank, before `finish_gradients`: begins to sum where that can be."""

    def finish_gradients(self, scale: float) -> None:
        """After the step's last backward, on all ranks of the role: sums what is not summed yet, and scales.

        Args:
            scale: usually one over the step's number of target tokens on all ranks.
        """

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients over all ranks of the role, counting each value once.

        Returns:
            a float64 scalar, equal on all ranks of the role.
        """
