"""One method run on the same items in four groupings: one by one, together, together reversed, one by one reversed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import torch

from flowtrain_lightning.packing_check import findings as say
from flowtrain_lightning.packing_check.dispatch_modes import SameDraws
from flowtrain_lightning.packing_check.findings import Difference, Finding, Method
from flowtrain_lightning.packing_check.passes import Pass, Passes, relative_errors
from flowtrain_lightning.packing_check.random_draws import draws_random_numbers, seed_all
from flowtrain_lightning.packing_check.rounding import EXACT, Bounds, loss_scale, rounding_bounds

T = TypeVar("T")


class Course(Generic[T]):
    """Runs a method on all items in each grouping, on one module, and compares what came of it.

    The second run together has other bounds and the same length: a mask that is kept from the first one is wrong there.

    Args:
        passes: of the module whose method it is.
        run: one pass over groups of items.
        items: at least one.
        method: its name in sentences.
        seed: where a random generator of the user's own could take its seed from.

    Attributes:
        alone: each item by itself.
        packed: all together; None where there is one item, or where that raises.
        findings: what is wrong but for the difference between the two.
        difference: between the two; None where rounding explains it.
        tolerance: relative error of the loss that rounding explains.
        draws: inside, random numbers are the same in every pass.
        numberless: tensors that hold something that is no number with each item by itself: they cannot be compared.
    """

    def __init__(
        self, passes: Passes, run: Callable[[Passes, Sequence[Sequence[T]]], Pass], items: Sequence[T], method: Method
    ) -> None:
        self.alone = Pass()
        self.packed: Pass | None = None
        self.findings: list[Finding] = []
        self.difference: Difference | None = None
        self.tolerance = EXACT
        self.draws: AbstractContextManager[object] = nullcontext()
        self._passes = passes
        self._run_on = run
        self._items = items
        self._method = method
        self.numberless: list[str] = []
        self._bounds: Bounds | None = None

    def run(self) -> None:
        """Runs all passes.

        Raises:
            Exception: whatever the method raises for one item alone; in float64, which it may not take, for several.
        """
        apart = [[item] for item in self._items]
        self.alone = self._run(apart)
        self.numberless = self.alone.without_numbers
        if len(self._items) == 1:
            return
        try:
            packed = self._packed_with_its_draws()
        except Exception as error:
            self._refuse(say.RAISES, error)
            return
        with self.draws:
            try:
                if packed is None:
                    self.alone, packed = self._run(apart), self._run([self._items])
                turned = self._run([self._items[::-1]])
                again = self._run(apart[::-1])
            except Exception as error:
                self._refuse(say.STATE_RAISES, error)
                return
            self.packed = packed
            self._compare(packed, turned, again)

    def _run(self, groups: Sequence[Sequence[T]]) -> Pass:
        return self._run_on(self._passes, groups)

    def _packed_with_its_draws(self) -> Pass | None:
        """All together; None where that draws random numbers, which no other pass could draw alike."""
        passes: list[Pass] = []
        if not draws_random_numbers(lambda: passes.append(self._run([self._items]))):
            return passes[0]
        self._note("random", say.RANDOM, seed=self._method.seed)
        self.draws = SameDraws()  # type: ignore[no-untyped-call]
        self._passes.before_call = partial(seed_all, 0)  # of Python and numpy, whose draws nobody sees
        return None

    def _compare(self, packed: Pass, turned: Pass, again: Pass) -> None:
        if (difference := self.compare(again, 1)) is not None:
            self._note(self._method.kind, say.STATE, difference=difference)
            return
        self.difference = self.compare(packed, len(self._items))
        if self.difference is None and (difference := self.compare(turned, len(self._items))) is not None:
            self._note(self._method.kind, say.STATE, difference=difference)

    def compare(self, other: Pass, together: int = 1, least: float = 0.0) -> Difference | None:
        """Compares a pass with one by one; None where rounding explains the difference, or it is at most ``least``."""
        alone = self.alone
        errors = relative_errors(alone.values, other.values) | relative_errors(alone.gradients, other.gradients)
        errors = {name: error for name, error in errors.items() if name not in self.numberless}
        of_loss = abs(other.loss - alone.loss) / loss_scale(alone) if math.isfinite(alone.loss) else 0.0
        if all(error <= EXACT for error in (of_loss, *errors.values())):
            return None
        if self._bounds is None:
            apart = [[item] for item in self._items]
            self._bounds = rounding_bounds(self._passes, lambda passes: self._run_on(passes, apart))
            self.tolerance = self._bounds.of_loss
        beyond = {name: error for name, error in errors.items() if not error <= max(least, self._bounds.of(name))}
        if not beyond and of_loss <= max(least, self._bounds.of_loss):
            return None
        worst = max(beyond, key=lambda name: beyond[name], default="")
        has_loss = bool(alone.losses)
        return Difference(
            together,
            packed=other.loss if has_loss else None,
            alone=alone.loss if has_loss else None,
            worst=worst,
            error=beyond.get(worst, of_loss),
            values_differ=not of_loss <= self._bounds.of_loss or any(name.startswith("features ") for name in beyond),
        )

    def _refuse(self, sentence: str, error: Exception) -> None:
        """Notes an error as a finding. In float64 it may be of the precision: the check then goes on in float32."""
        if self._passes.dtype == torch.float64:
            raise error
        self._note(self._method.kind, sentence, error=_told(error))

    def _note(self, kind: say.Kind, sentence: str, **parts: object) -> None:
        parts = {"method": self._method.name, "together": f"{len(self._items)} {self._method.items}"} | parts
        self.findings.append(Finding(kind, sentence.format(**parts)))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
